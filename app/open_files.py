"""How many files, sockets among them, a process may have open.

Invariant: only the soft limit changes, only upward, and a refusal ends nothing: who opens many asks what is in force.
"""

from __future__ import annotations

import logging
import resource

log = logging.getLogger(__name__)

WANTED = 65_536
"""A service with a few hundred nodes, or an agent with a thousand samples in flight, has as many sockets several times
over; the usual soft limit of 1,024 is for programs that use `select`, which has no more bits."""


def allow_open_files(wanted: int = WANTED) -> int:
    """Raise the soft limit as far as the hard one allows. Returns what is in force now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    highest = wanted if hard == resource.RLIM_INFINITY else min(wanted, hard)
    if soft != resource.RLIM_INFINITY and soft < highest:
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (highest, hard))
        except (ValueError, OSError) as error:
            log.info("no more than %d files can be open: %s", soft, error)
    return open_files()


def open_files() -> int:
    """How many files may be open now, as far as it matters here."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    return WANTED if soft == resource.RLIM_INFINITY else soft
