"""What a machine that is ours for a while may have changed in its kernel.

Invariant: nothing is touched unless the machine's environment says that it is ours, and a refusal ends nothing.
"""

from __future__ import annotations

import logging
from pathlib import Path

log = logging.getLogger(__name__)

SLOW_START = Path("/proc/sys/net/ipv4/tcp_slow_start_after_idle")


def keep_windows(path: Path = SLOW_START) -> bool:
    """Let idle connections keep their window, so that a version's first leaves needn't wait for slow start.

    Says whether it is so now.
    """
    try:
        if path.read_text().strip() == "0":
            return True
        path.write_text("0\n")
    except OSError as error:
        log.info("slow start after idle stays on: %s", error.strerror or type(error).__name__)
        return False
    log.info("slow start after idle is off")
    return True
