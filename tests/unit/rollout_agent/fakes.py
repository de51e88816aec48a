"""Fakes of what a worker works with: task, tokenizer, engine, clock, and the control service's node calls."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx

from app.protocol import trajectory
from app.protocol.work import UploadSlot, WorkItem
from app.rollout_agent.client import NodeClient
from app.rollout_agent.engines.base import Completion, GenRequest
from app.rollout_agent.groups import Batch
from app.snapshots.manifest import Manifest
from app.tasks.base import Prompt

Answer = Callable[[dict[str, Any]], httpx.Response]


class Letters:
    """A tokenizer whose ids are code points."""

    chat_template = None
    all_special_ids: Sequence[int] = ()

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": [ord(letter) for letter in text]}

    def decode(self, ids: Sequence[int], *, skip_special_tokens: bool, clean_up_tokenization_spaces: bool) -> str:
        assert skip_special_tokens
        assert not clean_up_tokenization_spaces
        return "".join(map(chr, ids))


class Echo:
    """Rewards by prompt index: what `rewards` says, an exception is raised."""

    name = "echo"
    train_size = 100
    heldout_size = 1

    def __init__(self, rewards: dict[int, float | Exception] | None = None) -> None:
        self._rewards = rewards or {}

    def train(self, index: int) -> Prompt:
        return Prompt(index, f"p{index}", {})

    def heldout(self, index: int) -> Prompt:
        return self.train(index)

    def reward(self, prompt: Prompt, completion_text: str) -> float:
        reward = self._rewards.get(prompt.index, 1.0)
        if isinstance(reward, Exception):
            raise reward
        return reward


class ScriptedEngine:
    """Answers with two letters a completion; raises what `failures` says first."""

    def __init__(self, failures: Sequence[Exception] = ()) -> None:
        self.version: int | None = 7
        self.quantisation: str | None = None
        self.tokenizer: Any = Letters()
        self.batches: list[Sequence[GenRequest]] = []
        self._failures = iter(failures)

    def load(self, model_dir: Path) -> None: ...

    def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        self.version = version

    def generate(self, requests: Sequence[GenRequest]) -> list[Completion]:
        self.batches.append(requests)
        failure = next(self._failures, None)
        if failure is not None:
            raise failure
        return [Completion([65, 66], [-0.5, -0.25], "length") for request in requests for _ in range(request.n)]

    def interrupt(self) -> None: ...

    def close(self) -> None: ...


class Clock:
    """Time that passes only by sleeping."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.now += seconds


class Wire:
    """The node calls: `answers` by last path segment, given the JSON body; object puts are kept, `objects` by path can
    be got."""

    def __init__(self, answers: dict[str, Answer], *, put: Callable[[], httpx.Response] | None = None) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.files: list[bytes] = []
        self.objects: dict[str, bytes] = {}
        self._answers = answers
        self._put = put or (lambda: httpx.Response(200))

    def client(self, clock: Clock) -> NodeClient:
        """A client on this wire."""
        http = httpx.AsyncClient(transport=httpx.MockTransport(self._handle))
        return NodeClient("http://control", http, sleep=clock.sleep, jitter=lambda: 1.0)

    def of(self, call: str) -> list[dict[str, Any]]:
        """Bodies of the calls of one kind."""
        return [body for name, body in self.calls if name == call]

    def _handle(self, request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            found = self.objects.get(request.url.path)
            return httpx.Response(404) if found is None else httpx.Response(200, content=found)
        if request.method == "PUT":
            self.files.append(request.content)
            return self._put()
        name = request.url.path.rsplit("/", 1)[-1]
        body = json.loads(request.content)
        self.calls.append((name, body))
        return self._answers[name](body) if name in self._answers else httpx.Response(204)


def accept(body: dict[str, Any]) -> httpx.Response:
    """A commit's answer: everything is accepted."""
    return httpx.Response(200, json={"accepted": body["work_items"]})


def problem(code: str, status: int, **more: Any) -> httpx.Response:
    """A problem answer."""
    body = {"type": code, "title": "T", "status": status, "detail": "why", **more}
    return httpx.Response(status, content=json.dumps(body), headers={"Content-Type": "application/problem+json"})


def batch_of(*indices: int, deadline: float) -> Batch:
    """A leased batch of groups of two: items w0, w1, …"""
    items = [
        WorkItem(id=f"w{n}", prompt_index=index, group_size=2, seed=n, deadline_s=60) for n, index in enumerate(indices)
    ]
    return Batch(items, UploadSlot(key="k", url="http://store/k"), {item.id: deadline for item in items})


def rows_of(file: bytes) -> list[trajectory.Rollout]:
    """What a trajectory file holds."""
    return trajectory.rollouts(trajectory.read_table(file))


@contextmanager
def pool() -> Iterator[ThreadPoolExecutor]:
    """One thread."""
    with ThreadPoolExecutor(1) as executor:
        yield executor
