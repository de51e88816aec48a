"""What an engine's checksums of its own weights show, when they are asked for, and what becomes of an engine then."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from app.protocol.errors import IntegrityError, Unavailable
from app.rollout_agent.engines.base import Tainted
from app.rollout_agent.engines.checksums import NOTHING, Mark, Seen, check, sources
from app.rollout_agent.engines.marks import marks_of
from app.rollout_agent.engines.vllm import VllmEngine
from app.rollout_agent.engines.vllm_checks import WeightChecks, due
from app.rollout_agent.engines.vllm_command import keeps_values
from app.rollout_agent.engines.vllm_http import EngineHttp
from app.snapshots.manifest import ADAPTER_ASSET
from tests.unit.rollout_agent.fakes import Clock
from tests.unit.rollout_agent.test_vllm_engine import Setup

NORM, QKV, UP = "model.norm.weight", "model.layers.0.self_attn.qkv_proj.weight", "model.layers.0.mlp.up_proj.weight"
PARTS = tuple(QKV.replace("qkv", part) for part in "qkv")
STACKED = "model.layers.3.mlp.experts.w13_weight"
EXPERTS = tuple(f"model.layers.3.mlp.experts.{n}.gate_proj.weight" for n in range(2))


def digests(found: Mapping[str, str], worker: int = 0) -> dict[str, str]:
    return {f"dp0:pp0:pcp0:tp{worker}:{name}": sha for name, sha in found.items()}


def marks(found: Mapping[str, str], *, telling: bool = True) -> dict[str, Mark]:
    return {name: Mark(sha, telling) for name, sha in found.items()}


def test_parameters_are_made_of_what_snapshots_hold() -> None:
    stored = ["model.embed.weight", *PARTS, UP, *EXPERTS]
    engine = ["model.embed.weight", "lm_head.weight", QKV, UP, STACKED, "model.layers.0.attn.scale"]
    assert sources(engine, stored, {"lm_head.weight": "model.embed.weight"}) == {
        "model.embed.weight": ("model.embed.weight",),
        "lm_head.weight": ("model.embed.weight",),
        QKV: PARTS,
        UP: (UP,),
        **{name: (name,) for name in EXPERTS},
    }


WAS = Seen(digests({NORM: "n0", QKV: "k0"}), marks({NORM: "N0", QKV: "K0"}))


@pytest.mark.parametrize(
    ("now", "engine", "wrong"),
    [
        ({NORM: "N1", QKV: "K1"}, {NORM: "n1", QKV: "k1"}, None),
        ({NORM: "N0", QKV: "K0"}, {NORM: "n0", QKV: "k0"}, None),
        ({NORM: "N0", QKV: "K1"}, {NORM: "n0", QKV: "k1"}, None),
        ({NORM: "N1", QKV: "K1"}, {NORM: "n1", QKV: "k0"}, f"{QKV} has not taken the new values .1 in all"),
        ({NORM: "N0", QKV: "K1"}, {NORM: "n1", QKV: "k1"}, f"{NORM} has other values than before .1 in all"),
        ({NORM: "N1", QKV: "K1"}, {NORM: "n1"}, "others than before"),
    ],
)
def test_what_changes_must_move_and_what_does_not_must_not(
    now: dict[str, str], engine: dict[str, str], wrong: str | None
) -> None:
    if wrong is None:
        assert check(WAS, marks(now), digests(engine), lossless=True).digests == digests(engine)
        return
    with pytest.raises(Tainted, match=wrong):
        check(WAS, marks(now), digests(engine), lossless=True)


@pytest.mark.parametrize("lossless", [True, False])
def test_a_parameter_that_was_the_learners_bit_for_bit_has_to_be_for_ever(lossless: bool) -> None:
    first = check(Seen(digests({NORM: "dummy"}), {}), marks({NORM: "N0"}), digests({NORM: "N0"}), lossless=lossless)
    assert first.exact == {NORM}
    second = check(first, marks({NORM: "N1"}), digests({NORM: "N1"}), lossless=lossless)
    with pytest.raises(Tainted, match=f"{NORM} is not the learner's"):
        check(second, marks({NORM: "N2"}), digests({NORM: "moved, but elsewhere"}), lossless=lossless)
    # A version in which its elements were all alike takes nothing back.
    alike = check(second, marks({NORM: "0"}, telling=False), digests({NORM: "0"}), lossless=lossless)
    with pytest.raises(Tainted, match=f"{NORM} is not the learner's"):
        check(alike, marks({NORM: "N2"}), digests({NORM: "moved, but elsewhere"}), lossless=lossless)


def test_a_tensor_that_is_the_same_in_every_order_shows_nothing_of_how_it_is_kept() -> None:
    bias = check(
        Seen(digests({NORM: "dummy"}), {}), marks({NORM: "N0"}, telling=False), digests({NORM: "N0"}), lossless=True
    )
    assert bias.exact == frozenset()
    check(bias, marks({NORM: "N1"}), digests({NORM: "in another order"}), lossless=True)


def test_of_a_version_before_the_first_every_parameter_is_another() -> None:
    with pytest.raises(Tainted, match=f"{NORM} has not taken"):
        check(Seen(digests({NORM: "dummy"}), {}), marks({NORM: "N0"}), digests({NORM: "dummy"}), lossless=True)


def test_nothing_is_said_of_what_is_kept_elsewhere_or_rounded() -> None:
    empty = Seen(digests({QKV: NOTHING}), {})
    assert check(empty, marks({QKV: "K0"}), digests({QKV: NOTHING}), lossless=True).exact == frozenset()
    check(WAS, marks({NORM: "N1", QKV: "K1"}), digests({NORM: "n0", QKV: "k1"}), lossless=False)


def test_of_several_workers_one_part_at_least_moves() -> None:
    was = Seen(digests({QKV: "a0"}) | digests({QKV: "b0"}, 1), marks({QKV: "K0"}))
    check(was, marks({QKV: "K1"}), digests({QKV: "a0"}) | digests({QKV: "b1"}, 1), lossless=True)
    with pytest.raises(Tainted, match="has not taken"):
        check(was, marks({QKV: "K1"}), was.digests, lossless=True)
    both = digests({NORM: "N0"}) | digests({NORM: "N0"}, 1)
    first = check(Seen(dict.fromkeys(both, "dummy"), {}), marks({NORM: "N0"}), both, lossless=True)
    with pytest.raises(Tainted, match="is not the learner's"):
        check(first, marks({NORM: "N1"}), both | digests({NORM: "N1"}), lossless=True)


def test_experts_that_are_stacked_are_held_against_it_by_layer() -> None:
    other = "model.layers.4.mlp.experts.w13_weight"
    was = Seen(digests({STACKED: "s0", other: "o0"}), marks(dict.fromkeys(EXPERTS, "E0")))
    now = marks({EXPERTS[0]: "E0", EXPERTS[1]: "E1"})
    check(was, now, digests({STACKED: "s1", other: "o0"}), lossless=True)
    for engine in ({STACKED: "s0", other: "o0"}, {STACKED: "s0", other: "o1"}):
        with pytest.raises(Tainted, match=r"model\.layers\.3 has not taken"):
            check(was, now, digests(engine), lossless=True)
    check(was, marks(dict.fromkeys(EXPERTS, "E0")), was.digests, lossless=True)
    kept_elsewhere = Seen(digests({STACKED: NOTHING}), was.marks)
    assert check(kept_elsewhere, now, kept_elsewhere.digests, lossless=True).marks == now
    check(was, now | marks({"visual.patch.weight": "V1"}), digests({STACKED: "s1", other: "o0"}), lossless=True)


@given(st.lists(st.lists(st.integers(0, 2), min_size=3, max_size=3), min_size=2, max_size=6), st.data())
def test_an_engine_that_takes_every_version_passes_and_one_that_misses_a_change_never(
    versions: list[list[int]], data: st.DataObject
) -> None:
    """Three parameters: one that the engine keeps as it is, one that it packs, one whose bytes are elsewhere."""
    names = ("plain", "packed", "elsewhere")

    def engine(values: list[int]) -> dict[str, str]:
        return digests({"plain": f"L{values[0]}", "packed": f"p{values[1]}", "elsewhere": NOTHING})

    seen = Seen(digests({"plain": "dummy", "packed": "dummy", "elsewhere": NOTHING}), {})
    for values in versions:
        seen = check(
            seen, marks({n: f"L{v}" for n, v in zip(names, values, strict=True)}), engine(values), lossless=True
        )
    missed = data.draw(st.sampled_from([0, 1]))
    values = [value + (3 if n == missed else 0) for n, value in enumerate(versions[-1])]
    with pytest.raises(Tainted):
        check(
            seen, marks({n: f"L{v}" for n, v in zip(names, values, strict=True)}), engine(versions[-1]), lossless=True
        )


def test_what_is_told_of_an_engine_counts_parameters_and_workers() -> None:
    found = digests({NORM: "N0", QKV: "k0", UP: NOTHING}) | digests({NORM: "N0", QKV: "k1", UP: NOTHING}, 1)
    seen = Seen(found, marks({NORM: "N0", UP: "U0", "model.embed.weight": "E0"}), frozenset({NORM}))
    assert (seen.names, seen.workers) == ({NORM, QKV, UP}, 2)
    assert seen.coverage == "of 3 parameters 2 known by name, 1 exact, 1 kept elsewhere"
    half = Seen(found | digests({UP: "u0"}, 1), seen.marks)
    assert half.coverage == "of 3 parameters 2 known by name, 0 exact, 0 kept elsewhere"


def test_engines_that_hold_the_same_have_one_digest_in_whatever_order_they_tell_it() -> None:
    found = digests({NORM: "N0", QKV: "k0"})
    again = dict(reversed(found.items()))
    assert Seen(found, {}).digest == Seen(again, marks({NORM: "N0"})).digest
    swapped = digests({NORM: "k0", QKV: "N0"})
    assert len({Seen(each, {}).digest for each in (found, swapped, digests({NORM: "N0"}))}) == 3


def test_of_many_faults_three_are_named_and_all_are_counted() -> None:
    names = [f"model.layers.{n}.norm.weight" for n in range(5)]
    was = Seen(digests(dict.fromkeys(names, "a")), marks(dict.fromkeys(names, "A")))
    with pytest.raises(Tainted, match=r"0\.norm.*1\.norm.*2\.norm[^3]*\(5 in all\)"):
        check(was, marks(dict.fromkeys(names, "B")), was.digests, lossless=True)


def test_marks_are_of_the_bytes_that_the_engine_keeps(tmp_path: Path) -> None:
    torch.manual_seed(0)
    state = {name: torch.randn(2, 3).to(torch.bfloat16) for name in PARTS} | {NORM: torch.ones(4, dtype=torch.bfloat16)}
    save_file(state, tmp_path / "p", metadata={"tied": json.dumps({"twin": NORM})})
    for dtype in (torch.float32, torch.bfloat16):
        found = marks_of(tmp_path / "p", [QKV, "twin"], dtype)
        whole = torch.cat([state[name] for name in PARTS]).to(dtype)
        assert found[QKV] == Mark(hashlib.sha256(whole.view(torch.uint8).numpy().data).hexdigest())
        assert not found["twin"].telling
    (tmp_path / "p").write_bytes(b"nothing")
    with pytest.raises(IntegrityError, match="can't be read"):
        marks_of(tmp_path / "p", [QKV], torch.float32)


@pytest.mark.parametrize(
    ("arguments", "config", "keeps"),
    [
        ([], {}, True),
        (["--max-num-seqs", "8"], {"quantization_config": None}, True),
        (["--quantization", "fp8"], {}, False),
        (["-q=fp8"], {}, False),
        (["--dtype=float16"], {}, False),
        (["--hf_overrides.dtype", "x"], {}, False),
        ([], {"quantization_config": {"quant_method": "fp8"}}, False),
    ],
)
def test_an_engine_that_rounds_is_known_by_its_settings(
    arguments: list[str], config: dict[str, Any], keeps: bool
) -> None:
    assert keeps_values(arguments, config) is keeps


def test_a_look_that_takes_long_takes_a_bounded_share_of_the_time() -> None:
    assert due(12.0, None, probed=True), "before the first version nothing is held up"
    assert due(0.1, 0.0, probed=True)
    assert [due(12.0, since, probed=False) for since in (0.0, 239.0, 240.0)] == [False, False, True]
    assert [due(12.0, since, probed=True) for since in (240.0, 1199.0, 1200.0)] == [False, False, True]


class Hashing:
    """An engine that takes a while to hash. `takes`: the seconds of each look; `holds`: what it then has."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self.takes = 12.0
        self.holds = {NORM: "dummy"}
        self.looks = 0

    async def checksums(self) -> dict[str, str]:
        self.looks += 1
        self.clock.now += self.takes
        return digests(self.holds)


async def test_versions_between_two_looks_are_held_against_the_last_one_that_was_seen(tmp_path: Path) -> None:
    clock = Clock()
    engine = Hashing(clock)
    checks = WeightChecks(cast(EngineHttp, engine), torch.bfloat16, lossless=True, clock=clock)

    async def swap(value: float, *, taken: bool = True) -> None:
        tensor = torch.tensor([value, 1.0], dtype=torch.bfloat16)
        save_file({NORM: tensor}, tmp_path / "p")
        found = await checks.prepare(tmp_path / "p", probed=False)
        if taken:
            engine.holds = {NORM: f"packed {value}"}
        await checks.verify(found, 1)

    await swap(2.0)
    assert engine.looks == 2, "as it was, and with the version"
    for value in (3.0, 4.0):
        clock.now += 100.0
        await swap(value, taken=False)
    assert engine.looks == 2
    clock.now += 100.0
    with pytest.raises(Tainted, match="has not taken"):
        await swap(5.0, taken=False)
    assert engine.looks == 3


@pytest.fixture
async def engine(tmp_path: Path) -> AsyncIterator[tuple[Setup, VllmEngine]]:
    """An engine that can tell checksums."""
    setup = Setup(tmp_path)
    setup.plan.set(parameters=[NORM, UP])
    made = setup.engine()
    await made.load(setup.model)
    yield setup, made
    await made.close()


def change(setup: Setup, *names: str) -> None:
    """The next version has other values there."""
    setup.state = {n: t + 0.5 if n in names else t for n, t in setup.state.items()}


async def test_a_swap_is_held_against_the_engines_checksums_before_anything_is_sampled(
    engine: tuple[Setup, VllmEngine],
) -> None:
    setup, vllm = engine
    await setup.install(vllm, 1)
    assert len(setup.plan.calls("/weight_checker")) == 2
    change(setup, NORM)
    await setup.install(vllm, 2)
    order = setup.plan.order()
    last = len(order) - 1 - order[::-1].index("/pause")
    assert order[last : last + 4] == ["/pause", "/collective_rpc", "/weight_checker", "/update_weight_version"]
    assert setup.plan.calls("/weight_checker") == [{"action": "checksum"}] * 3
    assert vllm.version == 2


async def test_engines_of_one_kind_say_the_same_of_the_same_version(engine: tuple[Setup, VllmEngine]) -> None:
    setup, vllm = engine
    told = [vllm.weights]
    for version, again in ((1, False), (2, False), (2, True)):
        if again:
            await vllm.load(setup.model)
            told.append(vllm.weights)
        elif version == 2:
            change(setup, NORM)
        await setup.install(vllm, version)
        told.append(vllm.weights)
    nothing, first, second, nothing_again, third = told
    assert nothing is nothing_again is None
    assert first is not None
    assert second is not None
    assert (first.version, first.engine) == (1, "vllm 0.32.0, float32, cpu, arguments none, 1 workers")
    assert (second.version, second.engine) == (2, first.engine)
    assert second.digest != first.digest
    assert third == second
    other = setup.engine(extra_args=("--max-num-seqs", "4"))
    try:
        await other.load(setup.model)
        await setup.install(other, 2)
        assert other.weights is not None
        assert other.weights.digest == second.digest
        assert other.weights.engine != second.engine
    finally:
        await other.close()


async def test_a_layer_that_was_not_taken_ends_the_engine_though_all_was_counted(
    engine: tuple[Setup, VllmEngine],
) -> None:
    setup, vllm = engine
    await setup.install(vllm, 1)
    setup.plan.set(not_taken=[UP])
    change(setup, NORM)
    await setup.install(vllm, 2)
    change(setup, UP, NORM)
    with pytest.raises(Tainted, match=r"v3 did not go into the engine: .*up_proj\.weight has not taken"):
        await setup.install(vllm, 3)
    assert (vllm.version, vllm.pid) == (None, None)
    setup.plan.set(parameters=[NORM, UP])
    await vllm.load(setup.model)
    await setup.install(vllm, 4)
    assert vllm.version == 4


async def test_an_engine_that_can_t_tell_its_checksums_works_without(
    engine: tuple[Setup, VllmEngine], caplog: pytest.LogCaptureFixture
) -> None:
    setup, vllm = engine
    setup.plan.set(**{"/weight_checker": 500})
    with caplog.at_level(logging.WARNING):
        await setup.install(vllm, 1)
        await setup.install(vllm, 2)
    assert vllm.version == 2
    assert len(setup.plan.calls("/weight_checker")) == 1
    assert "checksums are not used: the engine answers 500" in caplog.text


async def test_an_engine_that_could_and_can_not_any_more_is_ended(engine: tuple[Setup, VllmEngine]) -> None:
    setup, vllm = engine
    await setup.install(vllm, 1)
    setup.plan.set(**{"/weight_checker": 500})
    with pytest.raises(Tainted, match="answers 500 to /weight_checker"):
        await setup.install(vllm, 2)
    assert vllm.version is None


async def test_an_answer_without_checksums_is_an_error(engine: tuple[Setup, VllmEngine]) -> None:
    setup, vllm = engine
    setup.plan.set(parameters=[])
    assert vllm._life is not None
    with pytest.raises(Unavailable, match="has no checksums"):
        await vllm._life.http.checksums()


@pytest.mark.parametrize("adapter", [True, False])
async def test_who_has_no_checksums_or_an_adapter_is_not_asked_for_them(tmp_path: Path, adapter: bool) -> None:
    setup = Setup(tmp_path)
    if adapter:
        described = {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "peft_type": "LORA"}
        (setup.model / ADAPTER_ASSET).write_text(json.dumps(described))
        setup.plan.set(parameters=[NORM])
    vllm = setup.engine()
    try:
        await vllm.load(setup.model)
        assert vllm._checks is None
        if not adapter:
            await setup.install(vllm, 1)
            assert setup.plan.calls("/weight_checker") == []
    finally:
        await vllm.close()


def test_copies_of_a_model_are_one_kind_with_a_single_one_and_differ_where_one_of_them_does() -> None:
    one = {f"dp0:pp0:pcp0:tp{n}:{NORM}": f"n{n}" for n in range(2)}
    two = one | {f"dp1:pp0:pcp0:tp{n}:{NORM}": f"n{n}" for n in range(2)}
    odd = two | {f"dp1:pp0:pcp0:tp1:{NORM}": "other"}
    single, double, wrong = (Seen(held, {}) for held in (one, two, odd))
    assert (single.workers, double.workers, wrong.workers) == (2, 2, 2)
    assert single.digest == double.digest != wrong.digest
