"""Groups that nodes of several kinds hand in, and an auditor's view of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch

from app.learner.audit.decide import judge
from app.learner.audit.look import audit_of, look
from app.learner.audit.scoring import Scored, score
from app.learner.buffer import Group
from app.learner.sampling import sample
from app.protocol.audits import Audit
from app.protocol.trajectory import Rollout
from tests.unit.learner.samples import random_model

BOUND = 0.03
TOKENS = 12
EOS = frozenset({3, 8, 17, 30, 41})


class Shelf:
    """The weights of some versions, as the auditor has them; float32."""

    def __init__(self, models: dict[int, torch.nn.Module]) -> None:
        self.models = models

    def score(self, version: int, rollouts: Sequence[Rollout]) -> list[Scored] | None:
        model = self.models.get(version)
        return None if model is None else score(model, rollouts, 1.0, 4096)


def sharper(seed: int = 0):
    """A small model whose distributions are far from uniform, with tokens of all probabilities."""
    model = random_model(seed)
    with torch.no_grad():
        model.model.embed_tokens.weight.mul_(14)
    return model


def sampled(
    model,
    names: Sequence[str],
    generator: torch.Generator,
    *,
    version: int = 0,
    size: int = 4,
    temperature: float = 1.0,
) -> list[Group]:
    """Groups as a node samples them."""
    prompts = [torch.randint(4, 50, (5,), generator=generator).tolist() for _ in names]
    made = iter(
        sample(
            model, [p for p in prompts for _ in range(size)],
            max_tokens=TOKENS, temperature=temperature, eos=EOS, generator=generator,
        )
    )  # fmt: skip
    groups = []
    for name, prompt in zip(names, prompts, strict=True):
        rows = [
            Rollout(name, 0, i, prompt, c.ids, c.logprobs, [version], [0], float(i % 2), c.finish_reason)
            for i, c in ((i, next(made)) for i in range(size))
        ]
        groups.append(Group(name, tuple(rows), "n"))
    return groups


def told(group: Group, **fields) -> Group:
    """The group with fields of all its rollouts changed; a function is given the rollout."""
    rows = tuple(
        dataclasses.replace(r, **{k: v(r) if callable(v) else v for k, v in fields.items()}) for r in group.rollouts
    )
    return dataclasses.replace(group, rollouts=rows)


def audited(group: Group, shelf: Shelf, *, bound: float = BOUND, reward_off: float | None = 0.0, **options) -> Audit:
    """What an audit of a group finds."""
    never = options.pop("never", lambda _: False)
    flags = {"foreign": False, "chosen": False, **options}
    found = look(group, shelf, never, reward_off=reward_off, **flags)
    version = max(v for r in group.rollouts for v in r.span_versions)
    return audit_of(group, version, found, judge(found, bound))
