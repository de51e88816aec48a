"""Runs the engine's server as a child, and ends it with everything it started when the agent is gone.

Invariant: when this process's standard input closes (the agent has died, however it died), when it is told to end, or
when the server itself ends, nothing of its process group is left. It is run by path in the interpreter that has vLLM,
so it imports the standard library only.

    python echo2_engine_host.py MODULE ARGUMENT …
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import types

GRACE_S = 5.0
"""So long the server has to end in order after SIGTERM."""


def main(arguments: list[str]) -> int:
    """Run `python -m MODULE ARGUMENT …` until it, or the agent, ends. Returns the server's exit status."""
    server = subprocess.Popen([sys.executable, "-m", *arguments], stdin=subprocess.DEVNULL)

    def told(number: int, frame: types.FrameType | None) -> None:
        threading.Thread(target=_end, args=(server,), daemon=True).start()

    signal.signal(signal.SIGTERM, told)
    signal.signal(signal.SIGINT, told)
    threading.Thread(target=_watch_agent, args=(server,), daemon=True).start()
    code = server.wait()
    sys.stdout.flush()
    # The engine's own children may outlive the server that started them. This process is of the group, too.
    os.killpg(0, signal.SIGKILL)
    return code


def _watch_agent(server: subprocess.Popen[bytes]) -> None:
    """The agent holds the other end of this pipe and never writes to it."""
    while os.read(0, 1024):
        continue
    _end(server)


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        os.killpg(0, signal.SIGKILL)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
