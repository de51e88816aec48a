"""Between our form of a proof and that of the package `toploc`: modulus and coefficients, high bytes first."""

from __future__ import annotations

import numpy as np

from app.protocol.proofs import TOKENS, Proof, pack

THEIRS = np.dtype(">u2")


def theirs(proof: Proof) -> bytes:
    """A proof as the package writes it."""
    return np.asarray([proof.modulus, *proof.coefficients], dtype=THEIRS).tobytes()


def ours(data: bytes) -> bytes:
    """A proof of a whole run, as the package writes it, as words of ours."""
    modulus, *coefficients = np.frombuffer(data, dtype=THEIRS).astype(np.int64).tolist()
    return pack([Proof(TOKENS, modulus, np.asarray(coefficients))])
