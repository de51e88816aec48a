"""Proofs of the hidden states that tokens are drawn from, made while they are drawn.

Invariant: each token of a sample is in one proof, in order, whatever shares its batch; of what was sampled no more is
kept than the states of the last TOKENS steps and the largest values of those before.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch

from app.protocol.errors import BadInput
from app.protocol.proofs import POINTS, TOKENS, Proof, Proofs, before_head, pack, points, prove


@runtime_checkable
class Proving(Protocol):
    """An engine that can give proofs."""

    def prove(self) -> None:
        """From now on each completion comes with its proofs."""
        ...


def provable(engine: object) -> Proofs:
    """Which proofs an engine can give."""
    return "toploc" if isinstance(engine, Proving) else "none"


def start_proving(engine: object, wanted: Proofs) -> None:
    """Have an engine give the proofs that the job asks for. Raises BadInput for one that can't."""
    if wanted == "none":
        return
    if not isinstance(engine, Proving):
        raise BadInput(f"this job asks for proofs ({wanted}), which only ECHO2_ENGINE=transformers can give")
    engine.prove()


@dataclass(frozen=True, slots=True)
class _Run:
    """The largest values of the last run of tokens of some samples: [samples], [samples, points], twice."""

    rows: np.ndarray
    tokens: np.ndarray
    places: np.ndarray
    bits: np.ndarray


class Prover:
    """Follows one batch of samples. Rows are those of the whole batch, of which fewer and fewer go on."""

    def __init__(self, seen: list[Any], rows: int) -> None:
        """`seen`: as `before_head` gives it."""
        self._seen = seen
        self._rows = rows
        self._states: torch.Tensor | None = None
        self._there: torch.Tensor | None = None
        self._step = 0
        self._runs: list[_Run] = []

    def drawn(self, rows: torch.Tensor, going_on: torch.Tensor, source: torch.Tensor | None) -> None:
        """A token was drawn for the samples `rows` [n], of which those that are not `going_on` [n] had ended before.
        `source` [n]: which rows of the last pass they were drawn from; None: each from its own."""
        hidden = self._seen[0][:, -1]
        hidden = hidden if source is None else hidden[source]
        if self._states is None or self._there is None:
            self._states = hidden.new_zeros(self._rows, TOKENS, hidden.shape[-1], dtype=torch.bfloat16)
            self._there = torch.zeros(self._rows, TOKENS, dtype=torch.bool, device=hidden.device)
        at = self._step % TOKENS
        self._states[rows, at] = hidden.to(torch.bfloat16)
        self._there[rows, at] = going_on
        self._step += 1
        if at == TOKENS - 1:
            self._finish_run()

    def proofs(self) -> list[bytes]:
        """Of each row, those of all its tokens; nothing more can be drawn."""
        if self._step % TOKENS:
            self._finish_run()
        made: list[list[Proof]] = [[] for _ in range(self._rows)]
        for run in self._runs:
            for tokens in np.unique(run.tokens).tolist():
                same = run.tokens == tokens
                for row, proof in zip(run.rows[same], prove(tokens, *self._cut(run, same, tokens)), strict=True):
                    made[row].append(proof)
        return [pack(proofs) for proofs in made]

    def _cut(self, run: _Run, rows: np.ndarray, tokens: int) -> tuple[np.ndarray, np.ndarray]:
        count = points(tokens, self._width)
        return run.places[rows, :count], run.bits[rows, :count]

    @property
    def _width(self) -> int:
        return 0 if self._states is None else self._states.shape[-1]

    def _finish_run(self) -> None:
        if self._states is None or self._there is None:
            return
        rows = self._there.any(dim=1).nonzero().squeeze(1)
        states, there = self._states[rows], self._there[rows]
        size = states.abs().masked_fill_(~there.unsqueeze(-1), -1.0).flatten(1)
        places = size.topk(min(POINTS, size.shape[1]), dim=1).indices
        raw = states.flatten(1).gather(1, places).view(torch.int16)
        self._runs.append(
            _Run(
                rows.cpu().numpy(),
                there.sum(dim=1).cpu().numpy(),
                places.cpu().numpy(),
                raw.cpu().numpy().astype(np.int64) % (1 << 16),
            )
        )
        self._there.zero_()


@contextmanager
def following(model: Any, rows: int, *, wanted: bool) -> Iterator[Prover | None]:
    """A prover that sees what a model computes; None if it is not `wanted`."""
    with before_head(model, wanted=wanted) as seen:
        yield Prover(seen, rows) if wanted else None
