"""How many sockets a process may have: as many as it is allowed, not as many as a shell gives it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import resource, sys
soft, hard = int(sys.argv[1]), int(sys.argv[2])
resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
from app.open_files import allow_open_files, open_files
before = open_files()
print(before, allow_open_files(int(sys.argv[3])), resource.getrlimit(resource.RLIMIT_NOFILE))
"""


@pytest.mark.parametrize(
    ("soft", "hard", "wanted", "now"),
    [
        (256, 2048, 1024, 1024),
        (256, 512, 1024, 512),
        (512, 512, 1024, 512),
        (1500, 2048, 1024, 1500),
    ],
)
def test_the_soft_limit_goes_up_to_what_is_wanted_and_allowed(soft: int, hard: int, wanted: int, now: int) -> None:
    command = [sys.executable, "-c", SCRIPT, *map(str, (soft, hard, wanted))]
    said = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert said.strip() == f"{soft} {now} ({now}, {hard})"


@pytest.mark.parametrize("module", ["app.rollout_agent", "app.cli"])
def test_agent_and_service_ask_for_it_before_they_begin(module: str, tmp_path: Path) -> None:
    script = f"""
import resource, runpy, sys
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 1024))
sys.argv = ["{module}", "serve"]
try:
    runpy.run_module("{module}", run_name="__main__", alter_sys=True)
except SystemExit:
    pass
print("soft", resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""
    # Settings that end both at once: the agent has none, the service a state folder that is a file.
    (tmp_path / "state").write_text("")
    env = {"ECHO2_STATE_DIR": str(tmp_path / "state")}
    said = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120, env=env, check=True
    )
    assert "soft 1024" in said.stdout, said.stderr
