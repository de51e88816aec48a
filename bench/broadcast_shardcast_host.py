"""One host of a SHARDCAST network. Run by the Python of the environment that has the package, not by ours.

usage: broadcast_shardcast_host.py origin FOLDER FILE | relay FOLDER ORIGIN | client FOLDER SERVER...
Tells "ready", "published" and "have" as lines; an origin publishes FILE when a line comes in.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import shardcast  # type: ignore[import-not-found]

PORT = 8000
POLL_S = 1
"""The package's relays look for news every 30 s unless told otherwise, and waiting says nothing of its speed."""


def main() -> None:
    """Be what the command line says until killed."""
    role, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    # Every client fetches this file of each of its servers first, to rate it.
    Path(folder, "data1.bin").write_bytes(bytes(1000))
    if role == "origin":
        origin = shardcast.OriginServer(folder, PORT)
        print("ready", flush=True)
        for _ in sys.stdin:
            origin.broadcast(rest[0])
            print("published", flush=True)
    elif role == "relay":
        shardcast.MiddleNode([f"http://{rest[0]}:{PORT}"], folder, PORT, POLL_S)
        print("ready", flush=True)
        sys.stdin.read()
    else:
        client = shardcast.ClientNode([f"http://{server}:{PORT}" for server in rest], folder)
        print("ready", flush=True)
        seen: set[str] = set()
        while True:
            for version in sorted(set(client.list_available_versions()) - seen):
                if client.download_version(version):
                    seen.add(version)
                    print("have", flush=True)
            time.sleep(POLL_S)


if __name__ == "__main__":
    main()
