"""Proofs from a real agent, over its files, to the learner's auditor."""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
from pathlib import Path
from typing import Any

import httpx
import torch

from app.learner.audit.scoring import score
from app.learner.buffer import Group
from app.protocol.trajectory import Rollout
from app.rollout_agent.engines.transformers import TransformersEngine
from tests.integration.rollout_agent.fake_control import Control, eventually, running
from tests.integration.rollout_agent.test_hand_over import agent_of, ended
from tests.unit.learner.audit.samples import Shelf
from tests.unit.learner.audit.test_auditor import Rig
from tests.unit.rollout_agent.fake_stream import FakeStream
from tests.unit.rollout_agent.tiny import make_model

MAX_TOKENS = 40


def groups(rows: list[Rollout]) -> list[Group]:
    made = itertools.groupby(sorted(rows, key=lambda r: (r.work_item, r.sample_index)), key=lambda r: r.work_item)
    return [Group(item, tuple(found), "n") for item, found in made]


def judged(found: list[Group], control: Control, *seeds: int) -> list[str]:
    """What an auditor says of each group that has these weights for versions 0, 1, …"""
    rig = Rig(probation=10_000)
    rig.auditor._scorer = Shelf({v: make_model(control.model, seed) for v, seed in enumerate(seeds)})
    rig.auditor.start()
    rig.receive(*found)
    rig.settled()
    rig.auditor.stop()
    return [audit.fault or audit.verdict for audit in rig.court.audits_told]


async def test_what_an_agent_proves_holds_under_its_version_and_under_no_other(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.proofs, control.max_tokens = "toploc", MAX_TOKENS
        agent = agent_of(control, tmp_path / "node", TransformersEngine(threads=1), http)
        life = asyncio.create_task(agent.run())
        await eventually(lambda: len(control.committed) >= 4, "groups are committed")
        agent.stop()
        assert (await ended(life)).code == 0
        assert control.joins[0].proofs == "toploc"
        found = groups(control.rows)
        assert all(row.proofs for row in control.rows)
        assert set(judged(found, control, 0)) == {"passed"}
        stale = [Group(g.work_item, tuple(rescored(r, control) for r in g.rollouts), "n") for g in found]
        assert set(judged(stale, control, 7)) == {"proof"}, "the log-probs are those of the other weights"


def rescored(rollout: Rollout, control: Control) -> Rollout:
    [found] = score(make_model(control.model, 7), [rollout], 1.0, 4096)
    return dataclasses.replace(rollout, logprobs=found.logprob.tolist())


class Held(TransformersEngine):
    """Stops in the middle of its work, 39 tokens into its first batch, until it is interrupted."""

    def __init__(self, control: Control) -> None:
        super().__init__(threads=1)
        self._control = control
        self.passes = 0

    def _call(self, *inputs: Any) -> torch.Tensor:
        self.passes += bool(self._control.leased)
        if self.passes == 40:
            assert self._interrupted.wait(30)
        return super()._call(*inputs)


async def test_what_one_began_and_another_finished_has_the_proofs_of_both(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.proofs, control.max_tokens = "toploc", 150
        engine = Held(control)
        life = asyncio.create_task((first := agent_of(control, tmp_path / "one", engine, http)).run())
        await eventually(lambda: engine.passes == 40, "it is in the middle of its work")
        first.terminated()
        await ended(life)
        assert {len(row.completion_ids) for rows in control.begun.values() for row in rows} >= {39}
        control.token_used, control.give_work = False, False
        second = agent_of(control, tmp_path / "two", TransformersEngine(threads=1), http)
        life = asyncio.create_task(second.run())
        await eventually(lambda: set(control.begun) <= set(control.committed), "they are finished by the other")
        second.stop()
        await ended(life)
        assert {row.work_item for row in control.rows} == set(control.begun)
        assert max(len(row.completion_ids) for row in control.rows) > 39
        assert set(judged(groups(control.rows), control, 0)) == {"passed"}


async def test_an_engine_that_can_not_prove_ends_its_node_with_what_to_change(tmp_path: Path) -> None:
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        control.proofs = "toploc"
        ending = await ended(asyncio.create_task(agent_of(control, tmp_path / "n", FakeStream(), http).run()))
        assert control.joins[0].proofs == "none"
        assert ending.code == 1
        assert "ECHO2_ENGINE=transformers" in ending.reason
