"""What a rented machine is told: the script it runs and its environment. Pure.

Invariant: a machine gets the control URL and a one-time join token and no other secret.
"""

from __future__ import annotations

RELAY_PORT = 7070
"""Container port of the snapshot relay."""

_SCRIPT = """\
set -eu
if ! command -v echo2 >/dev/null 2>&1; then
  python3 -m pip install --quiet --disable-pip-version-check {package}
fi
exec echo2 agent
"""


def onstart(package: str) -> str:
    """Shell script for the provider's onstart: install the agent where the image lacks it, then become it."""
    return _SCRIPT.format(package=shell_quote(package))


OWN_MACHINES = frozenset({"static", "marketplace"})
"""Providers whose machines are the user's own: nothing of their systems is changed."""


def environment(*, control_url: str, join_token: str, engine: str, provider: str) -> dict[str, str]:
    """Environment of the machine."""
    told = {"ECHO2_CONTROL_URL": control_url, "ECHO2_JOIN_TOKEN": join_token, "ECHO2_ENGINE": engine}
    return told if provider in OWN_MACHINES else {**told, "ECHO2_TUNE_NETWORK": "1"}


def shell_quote(text: str) -> str:
    """Single-quoted for sh."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
