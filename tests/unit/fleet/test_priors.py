"""Speed that was measured by hand."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from app.fleet.estimates import Workload, estimate, gpu_table, prior, roofline
from app.fleet.priors import corrections, parse, read
from app.settings import SettingsError

LOAD = Workload(8_000_000_000, 512.0)


def line(**changes: object) -> str:
    bench = {
        "gpu_name": "RTX 4090",
        "num_gpus": 1,
        "parameters": 8_000_000_000,
        "concurrency": 64,
        "tokens_per_s": 900.0,
    }
    return json.dumps({**bench, "engine": "vllm", "swap_s": 1.5, **changes})


def promised(name: str = "RTX 4090", concurrency: int = 64) -> float:
    return roofline(gpu_table()[name], 1, Workload(8_000_000_000, 1.0, concurrency))


def test_a_measured_gpu_is_reckoned_with_as_measured_and_others_as_before(tmp_path: Path) -> None:
    file = tmp_path / "priors.jsonl"
    file.write_text(line(tokens_per_s=promised() * 0.5) + "\n\n")
    benched = read(file)
    load = Workload(LOAD.parameters, LOAD.tokens_per_rollout, benched=benched)
    found = prior("RTX_4090", 1, load)
    assert found.source == "bench"
    assert found.mu == pytest.approx(0.5 * prior("RTX 4090", 1, LOAD).mu)
    assert prior("RTX 3090", 1, load) == prior("RTX 3090", 1, LOAD)
    assert prior("Mystery 9000", 1, load) == prior("Mystery 9000", 1, LOAD)
    assert estimate(found, "RTX 4090", []).source == "bench"


@pytest.mark.parametrize("name", ["RTX 4090", "RTX_4090", "NVIDIA GeForce RTX 4090", "rtx 4090"])
def test_the_driver_s_name_and_the_provider_s_are_one(name: str) -> None:
    assert list(corrections(parse(line(gpu_name=name), "f"))) == ["RTX 4090"]


def test_several_measurements_count_as_their_geometric_mean() -> None:
    text = "\n".join(line(tokens_per_s=promised(concurrency=c) * f, concurrency=c) for c, f in ((1, 0.25), (256, 4.0)))
    assert corrections(parse(text, "f"))["RTX 4090"] == pytest.approx(1.0)


def test_a_gpu_that_no_data_sheet_is_known_of_is_reckoned_with_as_measured() -> None:
    benched = corrections(parse(line(gpu_name="Mystery 9000", tokens_per_s=1234.0, concurrency=256), "f"))
    found = prior("Mystery 9000", 1, Workload(LOAD.parameters, 512.0, benched=benched))
    assert found.mu == pytest.approx(1234.0 / 512)
    assert found.source == "bench"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("{", "line 1: the line"),
        (line() + "\n" + line(tokens_per_s=0), "line 2: tokens_per_s"),
        (line(gpu_name=""), "line 1: gpu_name"),
        (line(parameters=None), "line 1: parameters"),
    ],
)
def test_a_line_that_can_t_be_read_stops_the_start_and_is_named(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "priors.jsonl"
    file.write_text(text)
    with pytest.raises(SettingsError, match="ECHO2_PRIORS_FILE") as caught:
        read(file)
    assert said in caught.value.detail


def test_no_file_is_no_correction_and_an_absent_one_is_an_error(tmp_path: Path) -> None:
    assert read(None) == {}
    with pytest.raises(SettingsError, match="can't be read"):
        read(tmp_path / "absent")
