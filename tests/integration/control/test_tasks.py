"""A job with a task of its owner's own, from the post to what a node gets when it joins."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import Any

import httpx
from blake3 import blake3

from app.protocol.task_spec import TaskSpec
from app.tasks.registry import load_task
from tests.integration.control.rig import World, job_body

Open = Callable[..., AbstractAsyncContextManager[World]]
SOURCE = """
from app.tasks.base import Prompt

class Own:
    name, train_size, heldout_size = "own", 20, 5
    def __init__(self, params, seed):
        if params.get("level", 1) > 3:
            raise ValueError("level is 1 to 3")
    def train(self, index): return Prompt(index, f"p{index}", {})
    heldout = train
    def reward(self, prompt, text): return 1.0
"""


def folder(tmp_path: Path) -> Path:
    made = tmp_path / "tasks"
    made.mkdir()
    (made / "own.py").write_text(SOURCE)
    return made


async def test_a_node_gets_the_file_that_the_job_was_created_with(tmp_path: Path, open_world: Open) -> None:
    task_dir = folder(tmp_path)
    async with open_world(task_dir=task_dir) as control:
        job_id = await control.create(task={"name": "own.py:Own", "limits": {"processes": 1}}, rewards="both")
        (task_dir / "own.py").write_text("raise SystemExit")
        _, (node,) = await control.running(job_id)
        [ref] = node.answer.task_files
        assert (ref.path, ref.size) == ("source.py", len(SOURCE))
        assert node.answer.rewards == "both"
        answer = await httpx.AsyncClient(transport=httpx.ASGITransport(app=control.app)).get(ref.url)
        assert answer.content == SOURCE.encode()
        assert blake3(answer.content).hexdigest() == ref.blake3 == node.answer.task.files[0].blake3
        (tmp_path / "node").mkdir()
        (tmp_path / "node" / "source.py").write_bytes(answer.content)
        task: Any = load_task(node.answer.task, node.answer.seed, tmp_path / "node")
        assert task.train(3).text == "p3"
        task.close()


async def test_what_is_wrong_with_it_is_said_when_it_is_posted(tmp_path: Path, open_world: Open) -> None:
    async with open_world(task_dir=folder(tmp_path)) as control:
        for task, pointer, says in (
            ({"name": "none.py:Own"}, "/task/name", "there is no file 'none.py' in ECHO2_TASK_DIR"),
            ({"name": "own.py:Other"}, "/task/name", "own.py has no Other"),
            ({"name": "own.py:Own", "params": {"level": 4}}, "/task/params", "level is 1 to 3"),
            ({"name": "own.py:Own", "limits": {"memory_mb": 1}}, "/task/limits/memory_mb", "64"),
            (
                {"name": "own.py:Own", "files": [{"role": "source", "size": 1, "blake3": "0" * 64}]},
                "/task/files",
                "service",
            ),
        ):
            answer = await control.http.post("/v1/jobs", json=job_body(task=task))
            assert answer.status_code == 422, answer.text
            [error] = answer.json()["errors"]
            assert error["pointer"] == pointer
            assert says in error["detail"]
        assert (await control.get("/v1/jobs"))["items"] == []


async def test_tasks_that_take_long_to_load_keep_nothing_else_waiting(control: World) -> None:
    """Whatever runs in threads (objects, files of nodes, the calls of cloud providers) goes on."""
    gate = threading.Event()
    take = control.svc.jobs.take_task

    def slowly(task: TaskSpec, job_id: str) -> TaskSpec:
        assert gate.wait(20)
        return take(task, job_id)

    control.svc.jobs.take_task = slowly
    posts = [asyncio.create_task(control.http.post("/v1/jobs", json=job_body())) for _ in range(40)]
    try:
        async with asyncio.timeout(10):
            refused = [p for p in posts if p.done()]
            while len(refused) < 24:
                await asyncio.sleep(0.01)
                refused = [p for p in posts if p.done()]
            assert {p.result().status_code for p in refused} == {503}
            assert await asyncio.to_thread(lambda: 1) == 1
    finally:
        gate.set()
        answers = await asyncio.gather(*posts)
    assert sorted({a.status_code for a in answers}) == [201, 503]
