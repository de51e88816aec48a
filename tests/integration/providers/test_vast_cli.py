"""vast.ai's own command line, unchanged, against the local marketplace.

The client lives in a virtual environment of its own, `.venv-vastai` at the root of the repository, made on first use:
its pinned dependencies must not mix with ours.
"""

from __future__ import annotations

import asyncio
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from providers.base import Phase

from .rig import KEY, Rig

VERSION = "1.9.1"
ROOT = Path(__file__).parents[3]
INSTALL_S = 540
COMMAND_S = 60

Cli = Callable[..., Awaitable[str]]


def official_client() -> Path:
    """The `vastai` executable of the pinned version, installed if it is not there yet."""
    folder = ROOT / ".venv-vastai"
    done = folder / f".installed-{VERSION}"
    with (Path(tempfile.gettempdir()) / "echo2-venv-vastai.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True, timeout=INSTALL_S)
            pip = [str(folder / "bin/python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            subprocess.run([*pip, f"vastai=={VERSION}"], check=True, timeout=INSTALL_S)
            done.touch()
    return folder / "bin/vastai"


@pytest.fixture
def cli(rig: Rig, tmp_path: Path) -> Cli:
    """Run one command; returns what it printed. The client exits with 0 on errors too: only stderr tells."""
    executable = official_client()
    env = {
        "PATH": os.environ["PATH"],
        "HOME": str(tmp_path),
        "VAST_URL": rig.server.url,
        "VAST_API_KEY": KEY,
        "VASTAI_NO_UPDATE_CHECK": "1",
        "NO_PROXY": "127.0.0.1",
        "COLUMNS": "200",
    }

    async def run(*arguments: str, key: str = KEY, fails: bool = False) -> str:
        process = await asyncio.create_subprocess_exec(
            executable, *arguments, env={**env, "VAST_API_KEY": key}, stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
        async with asyncio.timeout(COMMAND_S):
            out, err = await process.communicate()
        text, problems = out.decode(), err.decode().replace("\r\x1b[K", "")
        if fails:
            return text + problems
        assert (process.returncode, problems, "Traceback" in text) == (0, "", False), text + problems
        return text

    return run


async def only_instance(rig: Rig) -> Any:
    """The marketplace's own row of its newest instance."""
    return (await rig.state())["instances"][-1]


@pytest.mark.timeout(900)
async def test_the_whole_life_of_an_interruptible_instance(rig: Rig, cli: Cli) -> None:
    query = (
        "gpu_name=RTX_4090 num_gpus>=1 reliability>0.99 dph<=1.2 inet_down>=500 duration>3 cuda_vers>=12.4 gpu_ram>=23 "
    )
    found = json.loads(await cli("search", "offers", query + "geolocation notin [CN,VN]", "--type", "bid", "--raw"))
    assert [row["machine_id"] for row in found] == [4201, 4202]
    assert found[0]["gpu_name"] == "RTX 4090"
    assert "RTX_4090" in await cli("search", "offers", "gpu_name=RTX_4090", "--limit", "5", "--storage", "60")

    onstart = 'echo "A is $A"; sleep 600'
    created = json.loads(
        await cli(
            "create", "instance", str(found[0]["id"]), "--image", "img", "--disk", "16", "--label", "cli", "--env",
            "-e A=B -p 8000:8000", "--onstart-cmd", onstart, "--ssh", "--direct", "--cancel-unavail", "--bid_price",
            "0.2", "--raw",
        )
    )  # fmt: skip
    number = str(created["new_contract"])
    assert created["success"] is True
    row = await only_instance(rig)
    assert (str(row["id"]), row["machine_id"], row["label"], row["is_bid"]) == (number, 4201, "cli", True)
    assert (await rig.seen())["creates_by_label"] == {"cli": 1}
    await rig.phase(number, Phase.RUNNING)

    (listed,) = json.loads(await cli("show", "instances", "--raw"))
    assert (listed["id"], listed["actual_status"], listed["extra_env"]) == (int(number), "running", {"A": "B"})
    assert listed["ports"]["8000/tcp"][0]["HostPort"].isdigit()
    table = await cli("show", "instances")
    assert number in table
    assert "cli" in table
    shown = json.loads(await cli("show", "instance", number, "--raw"))
    assert (shown["dph_base"], shown["label"], shown["is_bid"]) == (0.2, "cli", True)

    await cli("change", "bid", number, "--price", "0.25")
    assert (await rig.phase(number, Phase.RUNNING)).compute_micros_h == 250_000
    await cli("label", "instance", number, "renamed")
    assert (await only_instance(rig))["label"] == "renamed"
    assert "A is B" in await cli("logs", number, "--tail", "5")

    await cli("stop", "instance", number)
    assert (await only_instance(rig))["state"] == "stopped"
    await rig.quiet()
    await cli("start", "instance", number)
    await rig.phase(number, Phase.RUNNING)

    await cli("destroy", "instance", number, "-y")
    assert (await only_instance(rig))["state"] == "destroyed"
    state = await rig.quiet()
    assert json.loads(await cli("show", "instances", "--raw")) == []

    charges = json.loads(await cli("show", "invoices-v1", "--charges", "--raw", "--format", "tree"))
    (bill,) = charges["results"] if isinstance(charges, dict) else charges
    assert round(bill["amount"] * 1_000_000) == state["billed_micros"]
    assert {item["type"] for item in bill["items"]} >= {"gpu", "disk"}
    user = json.loads(await cli("show", "user", "--raw"))
    assert round(user["credit"] * 1_000_000) == 1_000_000_000 - state["billed_micros"]


@pytest.mark.timeout(900)
async def test_on_demand_and_refusals(rig: Rig, cli: Cli) -> None:
    offers = json.loads(await cli("search", "offers", "gpu_name=L40S", "--raw"))
    args = ("--image", "img", "--disk", "16", "--onstart-cmd", "sleep 600", "--raw")
    number = str(json.loads(await cli("create", "instance", str(offers[0]["id"]), *args))["new_contract"])
    assert (await only_instance(rig))["is_bid"] is False
    taken = await cli("create", "instance", str(offers[0]["id"]), *args, fails=True)
    assert "no_such_ask" in taken
    assert "Invalid user key" in await cli("destroy", "instance", number, "-y", key="wrong", fails=True)
    assert (await only_instance(rig))["state"] in ("loading", "running")
    await cli("destroy", "instances", number, "-y")
    assert (await only_instance(rig))["state"] == "destroyed"
