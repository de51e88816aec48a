"""Completions that came in pieces: under several versions, over a restart of the engine, or from two nodes.

Invariant: what is joined has one log-prob a token, and spans that begin at 0, grow, lie inside it and change the
version each time, as `app.protocol.trajectory` wants them; no token is lost or told twice.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from app.rollout_agent.engines.base import Completion, Span


def spanned(completion: Completion, version: int) -> Completion:
    """The completion with its spans spelled out; `version` was in force when it was asked for. Without a token it has
    none."""
    spans = completion.spans or (Span(version, 0),)
    return Completion(
        completion.token_ids,
        completion.logprobs,
        completion.finish_reason,
        tidy(spans, len(completion.token_ids)),
        completion.generated,
        completion.proofs,
    )


def join(begun: Completion | None, rest: Completion) -> Completion:
    """`rest` goes on where `begun` was cut; both have their spans. The end is that of `rest`."""
    if begun is None:
        return rest
    at = len(begun.token_ids)
    spans = [*begun.spans, *(Span(span.version, span.start + at) for span in rest.spans)]
    generated = None
    if begun.generated is not None or rest.generated is not None:
        generated = [*_marks(begun), *_marks(rest)]
    proofs = None
    if begun.proofs is not None or rest.proofs is not None:
        proofs = (begun.proofs or b"") + (rest.proofs or b"")
    tokens = [*begun.token_ids, *rest.token_ids]
    return Completion(
        tokens, [*begun.logprobs, *rest.logprobs], rest.finish_reason, tidy(spans, len(tokens)), generated, proofs
    )


def tidy(spans: Sequence[Span], tokens: int) -> tuple[Span, ...]:
    """Spans in order of their start: those without a token left out, neighbours of one version made one.

    The first one begins at 0, whatever an engine says: its tokens are from the version that was in force first.
    """
    kept: list[Span] = []
    ordered = [Span(span.version, 0 if i == 0 else span.start) for i, span in enumerate(spans)]
    ends = [span.start for span in ordered[1:]] + [tokens]
    for span, end in zip(ordered, ends, strict=False):
        if span.start >= min(end, tokens) or (kept and kept[-1].version == span.version):
            continue
        kept.append(span)
    return tuple(kept)


def oldest(completion: Completion) -> int | None:
    """The version that its staleness counts from; None without a token."""
    return min((span.version for span in completion.spans), default=None)


def sample_seed(item_seed: int, index: int, start: int) -> int:
    """Seed of sample `index` of a work item from token `start` on, 0 … 2⁶³ − 1. A piece that goes on elsewhere must not
    repeat the random numbers of the piece before."""
    digest = hashlib.blake2b(f"{item_seed}/{index}/{start}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _marks(completion: Completion) -> Sequence[bool]:
    return [True] * len(completion.token_ids) if completion.generated is None else completion.generated
