"""Files and their records do not change together: the same request twice at a time, a store that removes nothing, an
object that is replaced."""

from __future__ import annotations

import asyncio
import threading
from typing import Any

import pytest
from blake3 import blake3

from app.protocol.errors import EchoError, Forbidden, Unavailable
from app.protocol.partial import encode_partial
from app.protocol.trajectory import Rollout, encode
from app.storage.objects import PresignedPut
from tests.integration.control.conftest import BOTH
from tests.integration.control.rig import Node_, World
from tests.integration.control.test_exams import UNAUDITED, exam
from tests.integration.control.test_heldout_audits import answered, good, started, waiting
from tests.integration.control.test_quarantine import tell


def at_once(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """No file is looked at before two requests have it."""
    both, get = threading.Barrier(2, timeout=20), control.svc.core.objects.get

    def together(key: str, most: int | None = None) -> bytes:
        data = get(key, most)
        both.wait()
        return data

    monkeypatch.setattr(control.svc.core.objects, "get", together)


@BOTH
@pytest.mark.parametrize("audited", [True, False])
async def test_held_out_answers_that_are_committed_twice_at_a_time_keep_the_file_that_the_learner_needs(
    control: World, monkeypatch: pytest.MonkeyPatch, audited: bool
) -> None:
    """The service was slow to answer, so the node asked again."""
    _, learner, (node,) = await started(control, trust=None if audited else UNAUDITED)
    items, slot = await exam(node)
    names = [i.id for i in items]
    data = encode(
        [
            Rollout(i.id, i.prompt_index, s, [1], [4], [-0.1], [node.version], [0], 0.0, "stop")
            for i in items
            for s in range(i.group_size)
        ]
    )
    await node.put(slot, data)
    with monkeypatch.context() as patch:
        at_once(control, patch)
        answers = await asyncio.gather(*(node.commit(slot, data, names) for _ in range(2)))
    assert sorted(a.status_code for a in answers) == [200, 409]
    assert [a.json()["accepted"] for a in answers if a.is_success] == [names]
    assert (await node.commit(slot, data, names)).json()["accepted"] == names
    assert [ref.key for ref in await waiting(learner)] == ([slot.key] if audited else [])
    assert (control.svc.core.objects.head(slot.key) is not None) is audited
    assert (await control.node_row(node.id)).rollouts_delivered == 4 * 2 + sum(i.group_size for i in items)


@BOTH
async def test_groups_that_are_committed_twice_at_a_time_count_once(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = await control.create()
    learner, (node,) = await control.running(job_id)
    items, slot = await node.work(1)
    assert slot is not None
    data = encode(node.rollouts(items))
    await node.put(slot, data)
    with monkeypatch.context() as patch:
        at_once(control, patch)
        answers = await asyncio.gather(*(node.commit(slot, data, [items[0].id]) for _ in range(2)))
    assert sorted(a.status_code for a in answers) == [200, 409]
    assert (await node.commit(slot, data, [items[0].id])).json()["accepted"] == [items[0].id]
    assert len(await learner.poll()) == 1
    row = await control.node_row(node.id)
    assert (row.rollouts_accepted, row.files_refused) == (items[0].group_size, 0)


async def begin(node: Node_, items: list[Any]) -> dict[str, Any]:
    """Hand over the first sample of a group, cut after one token; the request."""
    slot = (await node.post("uploads", {"policy_version": 0})).json()
    cut = {"completion_ids": [4], "logprobs": [-0.1], "finish_reason": "abort"}
    data = encode_partial(node.rollouts(items, reward=0.0, **cut)[:1])
    put = await node.world.http.put(slot["url"], content=data, headers=slot["headers"])
    assert put.status_code == 200
    body = {"key": slot["key"], "size": len(data), "blake3": blake3(data).hexdigest(), "work_items": [items[0].id]}
    assert (await node.post("partials", body)).json() == {"taken": [items[0].id]}
    return {**slot, **body}


@pytest.mark.parametrize("error", [Unavailable("it is away"), Forbidden("it lets nobody remove")])
async def test_work_reaches_a_node_though_the_store_does_not_remove_what_is_thrown_away(
    control: World, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, error: EchoError
) -> None:
    """The groups were leased by then: no node would know that it has them."""
    job_id = await control.create(staleness_budget=1, stop={"steps": 50})
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    begun = await begin(one, items)
    for step in (1, 2):
        await learner.train([])
        await learner.publish(step)
    two.version = 2

    def refuse(key: str) -> None:
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(control.svc.core.objects, "delete", refuse)
        got, _ = await two.work(1)
    assert [(i.id, i.partial) for i in got] == [(items[0].id, None)]
    assert control.svc.core.objects.head(begun["key"]) is not None
    assert f"{begun['key']} could not be removed: {error.detail}" in caplog.messages


async def test_audits_are_answered_though_the_store_does_not_remove_the_files(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A learner that is refused would give up, and its job with it."""
    _, learner, (node,) = await started(control)
    seen = await answered(node, {0, 1})
    refs = await waiting(learner)

    def refuse(key: str) -> None:
        raise Forbidden("it lets nobody remove")

    with monkeypatch.context() as patch:
        patch.setattr(control.svc.core.objects, "delete", refuse)
        await tell(learner, *good(node, refs))
    assert (await control.node_row(node.id)).audits == len(seen)
    assert await waiting(learner) == []
    assert all(control.svc.core.objects.head(ref.key) is not None for ref in refs)


async def test_what_was_put_in_the_place_of_a_beginning_is_not_read_if_it_is_of_another_size(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An object store does not limit what is put: it may be larger than this service's memory."""
    job_id = await control.create()
    learner, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    begun = await begin(one, items)
    put = await control.http.put(begun["url"], content=b"x" * (begun["size"] + 1), headers=begun["headers"])
    assert put.status_code == 200
    read: list[str] = []
    get = control.svc.core.objects.get

    def noted(key: str, most: int | None = None) -> bytes:
        data = get(key, most)
        read.append(key)
        return data

    monkeypatch.setattr(control.svc.core.objects, "get", noted)
    got, slot = await two.work(1)
    assert slot is not None
    data = encode(two.rollouts(got))
    await two.put(slot, data)
    assert (await two.commit(slot, data, [got[0].id])).json()["accepted"] == [items[0].id]
    assert read == [slot.key]
    # That it was sampled from scratch is not proven.
    assert [ref.written_by for ref in await learner.poll()] == [{items[0].id: [one.id]}]


async def test_urls_are_signed_when_the_transaction_is_over(control: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever signs may have to ask the network for its credentials first, and all writers would wait for that."""
    job_id = await control.create()
    _, (one, two) = await control.running(job_id, nodes=2)
    items, _ = await one.work(1)
    await begin(one, items)
    database, objects = control.svc.core.db, control.svc.core.objects
    put, get, during = objects.presign_put, objects.presign_get, []

    def sign_put(key: str, expires_s: int, max_bytes: int) -> PresignedPut:
        during.append(("put", database._writer.locked()))
        return put(key, expires_s, max_bytes)

    def sign_get(key: str, expires_s: int) -> str:
        during.append(("get", database._writer.locked()))
        return get(key, expires_s)

    monkeypatch.setattr(objects, "presign_put", sign_put)
    monkeypatch.setattr(objects, "presign_get", sign_get)
    got, _ = await two.work(1)
    assert got[0].partial is not None
    assert during == [("get", False), ("put", False)]


async def test_versions_that_a_sweep_could_not_remove_go_in_the_next_one(
    control: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a large model each is gigabytes, and nobody else would ever look there."""
    job_id = await control.create(stop={"steps": 50})
    learner, (node,) = await control.running(job_id)
    objects, sweep = control.svc.core.objects, control.svc.loop.snapshots

    async def publish(version: int) -> None:
        await learner.publish(version)
        for name in ("manifest.json", "chunks/0", "chunks/1"):
            objects.put(f"jobs/{job_id}/snapshots/{version}/{name}", b"x")
        node.version = version
        await node.beat()

    def there() -> set[str]:
        return {item.key.split("/")[3] for item in objects.list(f"jobs/{job_id}/snapshots/")}

    for version in range(5):
        await publish(version)
    removed: list[str] = []
    delete = objects.delete

    def twice(key: str) -> None:
        if len(removed) == 2:
            raise Unavailable("it is away")
        removed.append(key)
        delete(key)

    with monkeypatch.context() as patch:
        patch.setattr(objects, "delete", twice)
        with pytest.raises(Unavailable):
            await sweep.collect()
    assert removed[0] == f"jobs/{job_id}/snapshots/0/manifest.json", "without it nobody takes the rest for whole"
    assert there() == {"0", "1", "2", "3", "4"}
    headers = {"Authorization": f"Bearer {node.token}"}
    assert (await control.http.get(f"/v1/nodes/{node.id}/snapshots/0", headers=headers)).status_code == 404
    await sweep.collect()
    assert there() == {"2", "3", "4"}
    # One that another process left behind.
    objects.put(f"jobs/{job_id}/snapshots/1/chunks/7", b"x")
    await control.restart()
    await control.svc.loop.snapshots.collect()
    assert there() == {"2", "3", "4"}
    await publish(5)
    await control.svc.loop.snapshots.collect()
    assert there() == {"3", "4", "5"}
