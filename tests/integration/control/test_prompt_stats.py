"""What is known of prompts goes with the groups that showed it."""

from __future__ import annotations

import pytest
from sqlalchemy import select

from app.fleet import prompts
from app.storage.models import Job, PromptStats
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import World
from tests.integration.control.test_quarantine import WRONG, audit, tell


@BOTH
async def test_what_withdrawn_groups_showed_of_their_prompts_is_forgotten(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prompts, "_BLOCK", 2)
    job_id = await control.create(batch={"prompts": 4})
    _, (node,) = await control.running(job_id)
    await node.produce(4)
    async with control.svc.core.db.write() as session:
        job = (await session.scalars(select(Job).where(Job.id == job_id))).one()
        first, *withdrawn = sorted(await session.scalars(select(PromptStats.prompt_index)))
        assert len(withdrawn) == 3
        await prompts.forget(session, job, withdrawn)
    async with control.svc.core.db.read() as session:
        assert set(await prompts.stats(session, job, [first, *withdrawn])) == {first}


async def test_what_an_expelled_node_showed_of_prompts_goes_with_its_groups(control: World) -> None:
    job_id = await control.create(batch={"prompts": 4})
    learner, (node, other, *_) = await control.running(job_id, nodes=2)
    lies, (honest,) = await node.produce(2), await other.produce(1)
    asked = {item.id: item.prompt_index for item in await control.items(job_id)}
    await tell(learner, audit(node, lies[0], **WRONG))
    async with control.svc.core.db.read() as session:
        known = set(await session.scalars(select(PromptStats.prompt_index)))
    assert known == {asked[honest]}
