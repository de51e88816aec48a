"""Where a file lies on the Hugging Face Hub.

Invariant: a revision is a commit: a name that may move, such as `main`, is refused by whoever reads it.
"""

from __future__ import annotations

from pydantic import Field

from app.protocol.base import Lenient

_NAME = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
COMMIT = r"^[0-9a-f]{40}$"
"""A git commit, in full."""


class HubRef(Lenient):
    """A public repository at one commit, readable without a token."""

    repo: str = Field(pattern=rf"^{_NAME}/{_NAME}$")
    revision: str = Field(pattern=COMMIT)
