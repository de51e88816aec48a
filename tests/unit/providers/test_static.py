"""The list of own machines, and what an ended ssh means."""

from __future__ import annotations

from pathlib import Path

import pytest

from providers import base
from providers.static import Machine, read_machines
from providers.static.machines import parse_machines
from providers.static.scripts import Unclear, program, read_check, verdict
from providers.static.ssh import command, judge

GOOD = """
[[machine]]
name = "box1"
address = "192.0.2.7"
user = "me"
gpu_name = "RTX 4090"
num_gpus = 2
port = 2222
price_per_hour = 0.123456
up_mbps = 900
down_mbps = 940.5
relay_port = 7070
"""


def test_machines_are_read_and_money_exactly(tmp_path: Path) -> None:
    (tmp_path / "machines.toml").write_text(GOOD)
    (machine,) = read_machines(tmp_path / "machines.toml")
    assert machine == Machine(
        "box1", "192.0.2.7", "me", "RTX 4090", 2, port=2222, price_micros_h=123_456, up_mbps=900.0, down_mbps=940.5,
        relay_port=7070,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ('name = "box1"', 'name = "-oProxyCommand=x"', "name"), ('user = "me"', 'user = "-l root"', "user"),
        ("192.0.2.7", "-oProxyCommand=x", "address"), ("192.0.2.7", "a b", "address"), ("192.0.2.7", "h;id", "address"),
        ("port = 2222", "port = 0", "port"), ("relay_port = 7070", "relay_port = 99999", "relay_port"),
        ("port = 2222", 'port = "22"', "port"), ("num_gpus = 2", "num_gpus = 0", "num_gpus"),
        ("0.123456", "-1", "price_per_hour"), ("0.123456", '"free"', "price_per_hour"), ("0.123456", "nan", "price"),
        ("num_gpus = 2", "gpus = 2", "gpus"), ('gpu_name = "RTX 4090"', "", "gpu_name"),
        ("up_mbps = 900", "up_mbps = -1", "mbps"),
        ("[[machine]]", "[[machines]]", "machine"), ("[[machine]]", "[[machine", "TOML"),
        ("relay_port = 7070", 'relay_port = 7070\nidentity_file = "-x"', "identity_file"),
        ("relay_port = 7070", f"relay_port = 7070{GOOD}", "box1"),
    ],
)  # fmt: skip
def test_a_list_that_can_t_be_says_what_to_change(old: str, new: str, said: str) -> None:
    assert old in GOOD
    with pytest.raises(base.BadRequest, match=said):
        parse_machines(GOOD.replace(old, new, 1))


def test_the_command_line_is_address_and_options_only() -> None:
    words = command(parse_machines(GOOD)[0])
    assert words[:3] == ["ssh", "-p", "2222"]
    assert words[-5:] == ["-l", "me", "--", "192.0.2.7", "bash -s"]


@pytest.mark.parametrize(
    ("status", "said", "kind", "reached"),
    [
        (255, "me@h: Permission denied (publickey).", base.AuthError, False),
        (255, "Host key verification failed.", base.AuthError, False),
        (255, "ssh: connect to host h port 22: Connection refused", base.Transient, False),
        (255, "ssh: connect to host h port 22: Connection timed out", base.Transient, False),
        (255, "ssh: Could not resolve hostname h: Name or service not known", base.Transient, False),
        (255, "client_loop: send disconnect: Broken pipe", base.Transient, True),
        (255, "", base.Transient, True),
        (1, "bash: Permission denied", base.Transient, True),
        (-9, "", base.Transient, True),
    ],
)
def test_what_an_ended_ssh_proves(status: int, said: str, kind: type[Exception], reached: bool) -> None:
    failed = judge(status, said, "static")
    assert type(failed.error) is kind
    assert failed.reached is reached


@pytest.mark.parametrize("output", ["", "<html>", "@none\n@none", "@instance running", "@label x", "@instance a b c"])
def test_an_answer_that_is_not_ours_is_unclear(output: str) -> None:
    with pytest.raises(Unclear):
        read_check(output, 0.0)


def test_answers_are_found_below_a_greeting() -> None:
    assert read_check("Welcome!\n@none\n", 0.0) is None
    seen = read_check("Welcome!\n@instance running a~1 1700000000 1700000040\n@label echo2:f:l:1 x\n", 1.7e9 + 40)
    assert seen is not None
    assert (seen.instance_id, seen.label, seen.running, seen.started_at) == ("a~1", "echo2:f:l:1 x", True, 1.7e9)
    assert verdict("hi\n@started 17\n", "@started", "@busy") == "@started"
    with pytest.raises(Unclear):
        verdict("@gone", "@started", "@busy")


@pytest.mark.parametrize("skew", [0, -3600, 3600, -1_700_000_000])
def test_a_machine_whose_clock_is_wrong_is_not_paid_for_other_hours(skew: int) -> None:
    begun, told = 1_700_000_000 + skew, 1_700_000_090 + skew
    seen = read_check(f"@instance running a~1 {begun} {told}\n@label l\n", 1_700_000_090.5)
    assert seen is not None
    assert seen.started_at == 1_700_000_000.5


def test_a_start_that_the_machine_does_not_tell_is_not_known() -> None:
    for begun in ("", "soon"):
        seen = read_check(f"@instance running a~1 {begun} 1700000000\n@label l\n", 1.7e9)
        assert seen is not None
        assert seen.started_at is None
    turned = read_check("@instance running a~1 1700000090 1700000000\n@label l\n", 1.7e9)
    assert turned is not None
    assert turned.started_at == 1.7e9, "a clock that was set back"


def test_a_name_that_is_no_variables_is_refused() -> None:
    with pytest.raises(base.BadRequest):
        program("x", {"A;id": "1"}, None, ())
