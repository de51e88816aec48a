"""Samples that came in pieces are valid rows, whatever the pieces were."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.protocol import trajectory
from app.rollout_agent.engines.base import Completion, Span
from app.rollout_agent.joining import join, oldest, sample_seed, spanned, tidy


@st.composite
def pieces(draw: st.DrawFn, reason: Literal["stop", "length", "abort"] = "abort") -> Completion:
    """What an engine may give: any number of tokens, with spans in order, or none because nothing changed."""
    tokens = draw(st.integers(0, 8))
    starts = sorted(draw(st.lists(st.integers(0, tokens), max_size=4)))
    spans = tuple(Span(draw(st.integers(0, 3)), start) for start in starts)
    ids = draw(st.lists(st.integers(0, 50), min_size=tokens, max_size=tokens))
    return spanned(Completion(ids, [-0.5 * i for i in range(tokens)], reason, spans), draw(st.integers(0, 3)))


def version_of(completion: Completion, token: int) -> int:
    return [span.version for span in completion.spans if span.start <= token][-1]


@given(st.lists(pieces(), min_size=1, max_size=5), pieces("length"))
def test_joined_pieces_are_one_valid_completion(cut: list[Completion], last: Completion) -> None:
    joined: Completion | None = None
    for piece in [*cut, last]:
        joined = join(joined, piece)
    assert joined is not None
    every = [*cut, last]
    assert joined.token_ids == [token for piece in every for token in piece.token_ids]
    assert joined.logprobs == [logprob for piece in every for logprob in piece.logprobs]
    assert joined.finish_reason == "length"
    want = [version_of(piece, token) for piece in every for token in range(len(piece.token_ids))]
    assert [version_of(joined, token) for token in range(len(want))] == want
    assert all(a.version != b.version for a, b in zip(joined.spans, joined.spans[1:], strict=False))
    if not want:
        assert joined.spans == ()
        return
    assert oldest(joined) == min(want)
    row = trajectory.Rollout(
        work_item="w",
        prompt_index=0,
        sample_index=0,
        prompt_ids=[1],
        completion_ids=joined.token_ids,
        logprobs=joined.logprobs,
        span_versions=[span.version for span in joined.spans],
        span_starts=[span.start for span in joined.spans],
        reward=0.0,
        finish_reason=joined.finish_reason,
    )
    table = trajectory.read_table(trajectory.encode([row]))
    trajectory.validate(table, {"w": trajectory.Expected(0, 1)}, newest_version=3, max_tokens=100)


@given(pieces())
def test_joining_nothing_changes_nothing_but_the_end(piece: Completion) -> None:
    joined = join(piece, Completion([], [], "length"))
    assert (joined.token_ids, joined.spans, joined.finish_reason) == (piece.token_ids, piece.spans, "length")
    assert join(None, piece) == piece


@pytest.mark.parametrize(
    ("spans", "tokens", "want"),
    [
        ([], 3, []),
        ([(4, 0)], 3, [(4, 0)]),
        ([(4, 0), (5, 2)], 3, [(4, 0), (5, 2)]),
        # A swap before the first token, after the last, twice at one token, and to the same version.
        ([(4, 0), (5, 0)], 3, [(5, 0)]),
        ([(4, 0), (5, 3)], 3, [(4, 0)]),
        ([(4, 0), (5, 1), (6, 1)], 3, [(4, 0), (6, 1)]),
        ([(4, 0), (4, 1), (5, 2)], 3, [(4, 0), (5, 2)]),
        # An engine that counts the first span from the prompt's end on.
        ([(4, 1), (5, 2)], 3, [(4, 0), (5, 2)]),
        ([(4, 0)], 0, []),
    ],
)
def test_spans_are_tidied(spans: list[tuple[int, int]], tokens: int, want: list[tuple[int, int]]) -> None:
    found = tidy([Span(version, start) for version, start in spans], tokens)
    assert [(span.version, span.start) for span in found] == want


def test_marks_of_who_wrote_are_joined_and_spelled_out_only_if_needed() -> None:
    plain, marked = Completion([1, 2], [0.0, 0.0], "abort"), Completion([3], [0.0], "stop", generated=[False])
    assert join(plain, plain).generated is None
    assert join(plain, marked).generated == [True, True, False]
    assert join(marked, plain).generated == [False, True, True]


@given(st.lists(st.tuples(st.integers(0, 2**63), st.integers(0, 63), st.integers(0, 9)), unique=True, max_size=40))
def test_no_two_pieces_have_the_same_seed(places: list[tuple[int, int, int]]) -> None:
    seeds = [sample_seed(*place) for place in places]
    assert len(set(seeds)) == len(seeds)
    assert all(0 <= seed < 2**63 for seed in seeds)
    assert seeds == [sample_seed(*place) for place in places]
