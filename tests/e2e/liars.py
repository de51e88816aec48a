"""Nodes that lie, each in one way, and one that does not: they speak for machines whose own agents were stopped.

They sample from the weights in the learner's folder, which they could as well have pulled, with code that the learner
has for itself; what they hand in goes the way of every node: join, heartbeats, work, upload, commit.
"""

from __future__ import annotations

import dataclasses
import random
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from blake3 import blake3

from app.learner.model import load, trained_weights
from app.learner.sampling import eos_ids, sample
from app.learner.tiny import tiny_model
from app.protocol.errors import IntegrityError
from app.protocol.task_spec import TaskSpec
from app.protocol.trajectory import Rollout, encode
from app.snapshots.codec import decode as decode_snapshot
from app.snapshots.files import PAYLOAD
from app.tasks.prompts import decode, encode_prompt
from app.tasks.registry import load_task
from tests.e2e.stage import CACHE, Stage

KINDS = ("rewards", "noise", "copies", "stale", "version")
"""Rewards that were not earned; log-probs with noise of 0.05 nats; answers to another prompt; the first weights of all
under the newest name; the newest weights under an older name."""
HONEST = "honest"
CHEAT = "cheat"
"""Honest where it is trained on; says that it answers every held-out prompt rightly."""
BEST = "best"
"""Makes each answer several times and sends the one with the highest reward: true log-probs, true rewards."""
TRIES = 4
BEHIND = 3
"""So much older is the name that `version` gives."""
ITEMS = 2


class Lab:
    """Model and task, shared by all of them: one samples at a time."""

    def __init__(self, task: dict[str, Any], max_tokens: int, learners: Path) -> None:
        self.loaded = load(tiny_model(CACHE), device=torch.device("cpu"))
        self.first = {n: t.clone() for n, t in trained_weights(self.loaded.model).items()}
        self.task = load_task(TaskSpec.model_validate(task), 0)
        self.max_tokens = max_tokens
        self.snapshots = self._learners = learners
        self.lock = threading.Lock()
        self.generator = torch.Generator().manual_seed(17)

    def follow(self, job_id: str) -> None:
        """Take the versions from this job's learner."""
        self.snapshots = self._learners / job_id / "snapshots"

    def newest(self) -> int:
        """The newest version that the learner has published."""
        return max((int(p.name) for p in self.snapshots.glob("*") if p.name.isdigit()), default=0)

    def weights(self, version: int) -> dict[str, torch.Tensor] | None:
        """A version's weights; None if it is gone."""
        try:
            return decode_snapshot(self.snapshots / str(version) / PAYLOAD)
        except (OSError, IntegrityError):
            return None

    def group(self, item: dict[str, Any], state: dict[str, torch.Tensor], version: int) -> list[Rollout]:
        """An honest group."""
        split = self.task.heldout if item.get("split") == "heldout" else self.task.train
        prompt = split(item["prompt_index"])
        with self.lock, torch.no_grad():
            for name, tensor in trained_weights(self.loaded.model).items():
                tensor.copy_(state[name])
            ids = encode_prompt(self.loaded.tokenizer, prompt)
            made = sample(
                self.loaded.model, [ids] * item["group_size"],
                max_tokens=self.max_tokens, temperature=1.0 if item.get("temperature") is None else 0.0,
                eos=eos_ids(self.loaded.model, self.loaded.tokenizer), generator=self.generator,
            )  # fmt: skip
            return [
                Rollout(
                    item["id"], prompt.index, i, ids, c.ids, c.logprobs, [version], [0],
                    self.task.reward(prompt, decode(self.loaded.tokenizer, c.ids)), c.finish_reason,
                )
                for i, c in enumerate(made)
            ]  # fmt: skip


class Impostor:
    """One node that is none, in a thread of its own."""

    def __init__(self, stage: Stage, join_token: str, kind: str, lab: Lab) -> None:
        self.kind = kind
        self._lab = lab
        self._http = httpx.Client(base_url=f"{stage.control_url}/v1/nodes", timeout=30.0, trust_env=False)
        request = {"agent_version": "0", "engine": "transformers"}
        joined = self._http.post("/join", json=request, headers={"Authorization": f"Bearer {join_token}"})
        assert joined.status_code == 200, joined.text
        self.id = str(joined.json()["node_id"])
        self._http.headers["Authorization"] = f"Bearer {joined.json()['node_token']}"
        self.over = threading.Event()
        self.handed_in = 0
        self.trouble: list[str] = []
        self._noise = random.Random(4)
        self._original: list[Rollout] = []
        self._threads = [threading.Thread(target=work, daemon=True) for work in (self._beats, self._works)]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Work no more."""
        self.over.set()
        for thread in self._threads:
            thread.join(60)
        self._http.close()

    def _beats(self) -> None:
        while not self.over.is_set():
            body = {"state": "active", "policy_version": self._claimed(), "rollouts_per_s": 20.0}
            answer = self._http.post(f"/{self.id}/heartbeat", json=body)
            if not answer.is_success or answer.json()["shutdown"]:
                self.over.set()
            self.over.wait(0.5)

    def _claimed(self) -> int:
        newest = self._lab.newest()
        return max(0, newest - BEHIND) if self.kind == "version" else newest

    def _works(self) -> None:
        while not self.over.wait(0.1):
            claimed = self._claimed()
            state = self._lab.first if self.kind == "stale" else self._lab.weights(self._lab.newest())
            if state is None:
                continue
            wanted = {"max_items": ITEMS, "policy_version": claimed, "wait_s": 1.0}
            answer = self._http.post(f"/{self.id}/work", json=wanted)
            if answer.is_success and answer.json()["items"]:
                items = [i for i in answer.json()["items"] if self.kind == CHEAT or i.get("split", "train") == "train"]
                groups = [self._lie(i, self._made(i, state, claimed), state) for i in items]
                self._hand_in(groups, answer.json()["upload"])

    def _made(self, item: dict[str, Any], state: dict[str, torch.Tensor], version: int) -> list[Rollout]:
        """A group of the policy; of `best` the best answers of several."""
        tries = [self._lab.group(item, state, version) for _ in range(TRIES if self.kind == BEST else 1)]
        return [max(same, key=lambda r: r.reward) for same in zip(*tries, strict=True)]

    def _lie(self, item: dict[str, Any], group: list[Rollout], state: dict[str, torch.Tensor]) -> list[Rollout]:
        change: dict[str, Callable[[Rollout], Rollout]] = {
            "rewards": lambda r: dataclasses.replace(r, reward=1.0 if r.reward < 1 else 0.0),
            "noise": lambda r: dataclasses.replace(
                r, logprobs=[min(0.0, p + self._noise.gauss(0, 0.05)) for p in r.logprobs]
            ),
            "copies": lambda r: self._copy(item, r, state),
            CHEAT: lambda r: dataclasses.replace(r, reward=1.0) if item.get("split") == "heldout" else r,
        }
        return [change.get(self.kind, lambda r: r)(r) for r in group]

    def _copy(self, item: dict[str, Any], rollout: Rollout, state: dict[str, torch.Tensor]) -> Rollout:
        """An answer to another question, with the log-probs and the reward that it had there."""
        if not self._original:
            self._original = self._lab.group({**item, "prompt_index": item["prompt_index"] + 1}, state, 0)
        found = self._original[rollout.sample_index % len(self._original)]
        return dataclasses.replace(
            rollout, completion_ids=found.completion_ids, logprobs=found.logprobs, reward=found.reward,
            finish_reason=found.finish_reason,
        )  # fmt: skip

    def _hand_in(self, groups: Sequence[Sequence[Rollout]], slot: dict[str, Any]) -> None:
        data = encode([r for group in groups for r in group])
        httpx.put(slot["url"], content=data, headers=slot["headers"], timeout=30.0, trust_env=False).raise_for_status()
        commit = {
            "key": slot["key"],
            "size": len(data),
            "blake3": blake3(data).hexdigest(),
            "work_items": [group[0].work_item for group in groups],
        }
        answer = self._http.post(f"/{self.id}/trajectories", json=commit)
        if answer.is_success:
            self.handed_in += len(answer.json()["accepted"])
        else:
            self.trouble.append(answer.text)
