"""A stand-in for the ssh client: it runs the script here, in a folder of the machine's own.

Invariant: it takes the same words as ssh, refuses a command line that holds more than address and options, and writes
down each call, so that a test can see what a passer-by would see in the process list.
"""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Any

_PROGRAM = """#!{python} -IS
import fcntl, json, os, subprocess, sys, time
root = {root!r}
words = sys.argv[1:]
host, user, key = words[words.index("--") + 1], words[words.index("-l") + 1], ""
if "-i" in words:
    key = words[words.index("-i") + 1]
script = sys.stdin.buffer.read()
with open(root + "/calls.jsonl", "a") as file:
    file.write(json.dumps({{"argv": words, "host": host, "script": script.decode()}}) + "\\n")
def take(kind):
    with open(root + "/faults.json", "r+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        faults = json.load(file)
        waiting = faults.get(kind, [])
        fault = waiting.pop(0) if waiting else None
        file.seek(0)
        file.truncate()
        json.dump(faults, file)
    return fault
if words[words.index("--") + 2:] != ["bash -s"]:
    sys.exit("only bash -s is known here")
if key == "wrong":
    print(user + "@" + host + ": Permission denied (publickey).", file=sys.stderr)
    sys.exit(255)
if os.path.exists(root + "/down-" + host):
    print("ssh: connect to host " + host + " port 22: Connection timed out", file=sys.stderr)
    sys.exit(255)
marks = (("create", b"setsid"), ("destroy", b"end TERM"), ("show", b"@none"))
kind = next((k for k, mark in marks if mark in script), "")
fault = take(kind)
if fault in ("lost", "busy", "noise"):
    if fault == "busy":
        print("@busy")
        sys.exit(0)
    if fault == "noise":
        print("<html>")
        sys.exit(0)
    sys.exit(255)
home = root + "/" + host
os.makedirs(home, exist_ok=True)
env = {{"HOME": home, "PATH": os.environ["PATH"], "USER": user}}
done = subprocess.run(["bash", "-s"], input=script, env=env, cwd=home, capture_output=True, timeout=30)
if fault == "done_then_lost":
    sys.exit(255)
sys.stdout.buffer.write(done.stdout)
sys.stderr.buffer.write(done.stderr)
sys.exit(done.returncode)
"""


class SshEmulator:
    """Machines that are folders below `root`; `executable` is the ssh to run."""

    def __init__(self, root: Path) -> None:
        root.mkdir(parents=True, exist_ok=True)
        self.root = root
        self.executable = root / "ssh"
        self.executable.write_text(_PROGRAM.format(python=sys.executable, root=str(root)))
        self.executable.chmod(0o755)
        (root / "faults.json").write_text("{}")

    @property
    def calls(self) -> list[dict[str, Any]]:
        """Every call so far: argv, host and script."""
        path = self.root / "calls.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []

    def fail(self, call: str, *faults: str) -> None:
        """The next calls of a kind (create, destroy, show) fail: lost, done_then_lost, busy, noise."""
        path = self.root / "faults.json"
        waiting = json.loads(path.read_text())
        waiting.setdefault(call, []).extend(faults)
        path.write_text(json.dumps(waiting))

    def down(self, host: str, is_down: bool = True) -> None:
        """Switch a machine off, or on."""
        path = self.root / f"down-{host}"
        path.touch() if is_down else path.unlink(missing_ok=True)

    def home(self, host: str) -> Path:
        """The machine's home folder."""
        return self.root / host

    def creates(self) -> list[str]:
        """Instance ids of the create commands, oldest first."""
        scripts = [call["script"] for call in self.calls if "setsid" in call["script"]]
        return [shlex.split(script.split("\nid=")[1].splitlines()[0])[0] for script in scripts]
