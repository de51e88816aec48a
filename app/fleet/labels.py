"""How what we rent is told from what others rent, and tokens from each other.

Invariant: nothing is ever ended that does not carry our label; of a token only its hash is stored.
"""

from __future__ import annotations

import hashlib


def label_prefix(fleet_id: str) -> str:
    """Labels of this fleet begin so; nothing else is ever touched."""
    return f"echo2:{fleet_id}:"


def token_hash(token: str) -> str:
    """Hash under which a token is stored."""
    return hashlib.sha256(token.encode()).hexdigest()
