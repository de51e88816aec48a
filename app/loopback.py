"""A learner's calls to a service on its own computer go past the proxies of the environment.

Invariant: no proxy sees a token on its way from one process of a computer to another, and none has to be reachable for
that. Proxies for other hosts are used as the environment has them. Not for agents: the local marketplace gives its
machines a proxy, by which it counts their traffic.
"""

from __future__ import annotations

from collections.abc import Mapping

import httpx

PAST_PROXIES: Mapping[str, httpx.BaseTransport | None] = {
    "all://127.0.0.1": None,
    "all://localhost": None,
    "all://[::1]": None,
}
"""`mounts` of an `httpx.Client`: hosts for which its own transport is used."""
