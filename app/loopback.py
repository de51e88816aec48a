"""Calls to this computer go past the proxies of the environment.

Invariant: no proxy sees a key or a token on its way from one process of a computer to another, and none has to be
reachable for that. Proxies for other hosts are used as the environment has them.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

PAST_PROXIES: Mapping[str, httpx.AsyncBaseTransport | None] = {
    "all://127.0.0.1": None,
    "all://localhost": None,
    "all://[::1]": None,
}
"""`mounts` of an `httpx.AsyncClient`: hosts for which its own transport is used."""
PAST_PROXIES_SYNC: Mapping[str, httpx.BaseTransport | None] = dict.fromkeys(PAST_PROXIES)
"""The same for an `httpx.Client`."""
