"""Two ranks under torchrun against one process: the same losses, gradients and weights; and how they end together."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.integration.learner.rank_steps import ALONE, Case, play, write

TOP = Path(__file__).parents[3]
GAC = {"micro_batch_tokens": 40, "gac": True, "gac_low": 0.01, "gac_high": 0.5, "learning_rate": 1e-4}
CASES = {
    "plain": Case({"loss": "ppo_clip", "micro_batch_tokens": 40, "grad_cosine": True}),
    "whole_step": Case({"loss": "m2po", "micro_batch_tokens": 40, "kl_beta": 0.01}),
    "packed": Case({"packing": True, "micro_batch_tokens": 60, "activation_checkpointing": True}),
    "adapter": Case({"lora": {"rank": 4, "alpha": 8}}),
    "bent": Case({"loss": "obrs", "micro_batch_tokens": 40, "gac": True, "gac_low": 0.001}),
    "dialogue": Case({"loss": "m2po", "micro_batch_tokens": 40}, steps=[5, 5]),
    "one": Case(steps=[0]),
    "broken": Case(broken=True),
    "silent": Case(steps=[4]),
}


def torchrun(ranks: int, *arguments: str) -> list[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*program, *arguments]


def run_ranks(out: Path, cases: dict[str, Case], ranks: int = 2) -> None:
    out.mkdir()
    write(cases, out / "cases.json")
    command = torchrun(ranks, "-m", "tests.integration.learner.rank_steps", str(out), str(out / "cases.json"))
    done = subprocess.run(command, cwd=TOP, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """What one process, and what two made of the cases."""
    torch.set_num_threads(1)
    one, two = (tmp_path_factory.mktemp("ranks") / name for name in ("one", "two"))
    one.mkdir()
    for name, case in CASES.items():
        play(case, ALONE, one / name)
    later = {
        "resumed": Case(start=str(one / "one"), steps=[1, 2]),
        "half": Case({"loss": "ppo_clip", "precision": "bfloat16", "grad_clip": 1e9, "gac": True}),
        "uninterrupted": Case(GAC, steps=[0, 0, 0]),
        "killed": Case(GAC, steps=[0, 0]),
        "went_on": Case(GAC, start=str(two / "killed"), steps=[0]),
    }
    run_ranks(two, CASES | later)
    play(Case(start=str(two / "one"), steps=[1, 2]), ALONE, one / "resumed")
    return one, two


def told(folder: Path) -> dict:
    return json.loads((folder / "told.json").read_text())


def close(one: Path, two: Path, part: str) -> None:
    a, b = (load_file(folder / f"{part}.safetensors") for folder in (one, two))
    assert a.keys() == b.keys()
    for name in a:
        same = torch.equal(a[name], b[name])
        assert same or (a[name] - b[name]).norm() <= 1e-5 * b[name].norm(), name


@pytest.mark.parametrize("name", [*CASES, "resumed"])
def test_two_ranks_do_what_one_does(both: tuple[Path, Path], name: str):
    one, two = (folder / name for folder in both)
    assert len(load_file(two / "weights.safetensors")) > 0
    for alone, shared in zip(told(one)["values"], told(two)["values"], strict=True):
        assert alone.keys() >= {"mismatch_kl", "ess"} | ({"mismatch_kl_node_n0"} if alone["active_tokens"] else set())
        # pytest takes the larger of the two: `abs` is for what cancels to next to nothing.
        assert alone == pytest.approx(shared, rel=1e-5, abs=1e-8)
    assert told(one)["steps"] == told(two)["steps"]
    assert told(two)["prior"] > 0
    assert told(one)["failure"] == told(two)["failure"]
    # AdamW's first moment is a mean of the gradients.
    close(one, two, "optimizer")
    close(one, two, "weights")


def test_the_number_of_ranks_may_change_between_two_checkpoints(both: tuple[Path, Path]):
    plain, one, two = (folder / name for folder, name in ((both[0], "one"), (both[0], "resumed"), (both[1], "resumed")))
    assert told(plain)["steps"] == 1
    assert told(one)["steps"] == told(two)["steps"] == 3
    unbroken = both[1] / "straight"
    play(Case(), ALONE, unbroken)
    for folder in (one, two):
        close(unbroken, folder, "weights")


def test_a_run_that_goes_by_the_previous_gradient_goes_on_bit_by_bit(both: tuple[Path, Path]):
    whole, killed, heir = (both[1] / name for name in ("uninterrupted", "killed", "went_on"))
    assert [v.get("gac_skipped") for v in told(whole)["values"]] == [None, 1.0, 0.0]
    assert told(whole)["values"][2]["gac_removed"] > 0, "the first step after the kill goes by what was before it"
    assert told(killed)["skipped"]
    assert told(heir)["values"] == told(whole)["values"][2:]
    for part in ("weights", "optimizer"):
        found, wanted = (load_file(folder / f"{part}.safetensors") for folder in (heir, whole))
        assert found.keys() == wanted.keys()
        assert all(torch.equal(t, wanted[name]) for name, t in found.items())
    assert any(name.startswith("gradient/") for name in found)


def test_a_loss_that_is_not_finite_is_told_by_all_and_changes_nothing(both: tuple[Path, Path]):
    made = told(both[1] / "broken")
    assert "not finite" in made["failure"]
    assert made["steps"] == 0


def test_passes_in_bfloat16_are_close_and_weights_stay_float32(both: tuple[Path, Path]):
    plain, half = both[0] / "plain", both[1] / "half"
    for name in ("loss", "mismatch_kl", "grad_norm"):
        exact, rounded = (told(folder)["values"][0][name] for folder in (plain, half))
        assert rounded == pytest.approx(exact, rel=0.1, abs=0.01)
        assert rounded != exact
    for part in ("weights", "optimizer"):
        assert {t.dtype for t in load_file(half / f"{part}.safetensors").values()} == {torch.float32}


def test_gradients_of_passes_in_bfloat16_are_put_together_in_float32(both: tuple[Path, Path]):
    kept = load_file(both[1] / "half" / "optimizer.safetensors")
    gradients = [t for name, t in kept.items() if name.startswith("gradient/")]
    # Each rank's part is in bfloat16; their sum would be, too, if it were made in it.
    assert any(not torch.equal(t, t.bfloat16().float()) for t in gradients)


@pytest.mark.parametrize("name", ["plain", "half"])
def test_no_rank_of_several_holds_the_layers_whole_after_a_pass(both: tuple[Path, Path], name: str):
    assert told(both[1] / name)["whole"] == 0


def test_only_the_adapter_moves(both: tuple[Path, Path]):
    names = load_file(both[1] / "adapter" / "weights.safetensors")
    assert all(name.startswith("base_model.model.model.layers.") for name in names)
    assert {name.rpartition("lora_")[2] for name in names} == {"A.weight", "B.weight"}
    assert all(t.abs().sum() > 0 for t in names.values())
