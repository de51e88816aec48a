"""What a heartbeat says of a node's links, and what a rented machine's kernel is told."""

from __future__ import annotations

import os
import stat
from pathlib import Path
from types import SimpleNamespace

import pytest

from app.fleet.bootstrap import environment
from app.protocol.node import Heartbeat, NodeState
from app.rollout_agent.config import load_settings
from app.rollout_agent.links import measured_links
from app.rollout_agent.tuning import keep_windows
from app.snapshots.rates import News, Rate


def meter(rate: Rate | None = None, windows: int = 0) -> SimpleNamespace:
    return SimpleNamespace(rate=rate, windows=windows)


def puller(**meters: SimpleNamespace) -> SimpleNamespace:
    return SimpleNamespace(meters={"learner": meter(), "peer": meter(), "store": meter(), **meters})


def test_without_measurements_nothing_is_said() -> None:
    assert measured_links(News(), None, None) == {}
    assert measured_links(News(), puller(), SimpleNamespace(meter=meter())) == {}  # type: ignore[arg-type]


def test_a_measurement_is_said_once_and_the_faster_source_counts() -> None:
    news = News()
    pulling = puller(learner=meter(Rate(5e6, False), 1), peer=meter(Rate(9e6, False), 3))
    relay = SimpleNamespace(meter=meter(Rate(2e6, True), 1))
    told = measured_links(news, pulling, relay)  # type: ignore[arg-type]
    assert told == {
        "down_bytes_per_s": 9e6,
        "down_source": "peer",
        "up_bytes_per_s": 2e6,
        "up_limited": True,
    }
    beat = Heartbeat(state=NodeState.ACTIVE, policy_version=1, **told)
    assert Heartbeat.model_validate_json(beat.model_dump_json()) == beat
    assert measured_links(news, pulling, relay) == {}  # type: ignore[arg-type]


def test_slow_start_is_turned_off_once(tmp_path: Path) -> None:
    switch = tmp_path / "tcp_slow_start_after_idle"
    switch.write_text("1\n")
    assert keep_windows(switch)
    assert switch.read_text() == "0\n"
    switch.chmod(stat.S_IRUSR)
    assert keep_windows(switch), "it is off already"


def test_a_kernel_that_may_not_be_told_stays_as_it_is(tmp_path: Path) -> None:
    assert not keep_windows(tmp_path / "missing")
    if os.geteuid() != 0:
        switch = tmp_path / "tcp_slow_start_after_idle"
        switch.write_text("1\n")
        switch.chmod(stat.S_IRUSR)
        assert not keep_windows(switch)
        assert switch.read_text() == "1\n"


@pytest.mark.parametrize(
    ("provider", "tuned"), [("vastai", True), ("ec2", True), ("static", False), ("marketplace", False)]
)
def test_only_rented_machines_are_told_to(provider: str, tuned: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    told = environment(control_url="http://c.test", join_token="t", engine="paced", provider=provider)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert load_settings().tune_network is tuned


@pytest.mark.parametrize("mirror", [None, "https://hf-mirror.example.org"])
def test_a_machine_is_told_of_a_mirror_of_the_hub_if_there_is_one(
    mirror: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    told = environment(
        control_url="http://c.test", join_token="t", engine="paced", provider="vastai", hf_endpoint=mirror
    )
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    assert load_settings().hf_endpoint == (mirror or "https://huggingface.co")
