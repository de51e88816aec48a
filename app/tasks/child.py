"""The process that a sandboxed task lives in: one JSON line in, one JSON line out, until its input ends.

Invariant: what the task prints never mixes with the answers, and whatever it raises becomes an answer; only this file
and what it imports of ours run before the process is confined.

| question | answer |
|---|---|
| `{"op": "load", "spec", "seed", "folder"}` | `{"name", "multi_turn", "deterministic"}` |
| `{"op": "size", "split"}` | `{"size"}` |
| `{"op": "prompt", "split", "index"}` | `{"text"}` |
| `{"op": "reward", "split", "index", "turns"}` | `{"reward"}` |
| `{"op": "respond", "split", "index", "turns"}` | `{"text"}`, null when the episode is over |

Each question has an `id` and `cpu_s`; the answer repeats the id, or holds `{"bad_input", "errors"}` or `{"failed"}`.
"""

from __future__ import annotations

import functools
import io
import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from app.tasks.confine import allow_cpu, confine
from app.tasks.landlock import grants

_Ask = Mapping[str, Any]
PROMPTS_KEPT = 256


def main(*, memory: int, network: bool, code: str, readable: Sequence[str]) -> int:
    """Confine this process and serve. The exit status: 0 when the input ended.

    `memory`: bytes; `code`: the folder that holds `app`; `readable`: paths that the task may read besides.
    """
    own = os.getcwd()
    cut = confine(memory, network=network, folder=own, grants=grants(own, code, readable))
    asks, answers = os.fdopen(os.dup(0), "rb"), os.fdopen(os.dup(1), "wb")
    quiet = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(quiet, descriptor)
    os.close(quiet)
    serve(asks, answers, cut)
    return 0


def serve(asks: io.BufferedIOBase | Any, answers: Any, cut: list[str]) -> None:
    """Answer until there are no more questions."""
    served = _Served(cut)
    for line in asks:
        ask = json.loads(line)
        allow_cpu(ask["cpu_s"])
        answer = {"id": ask["id"], **_answer(served, ask)}
        answers.write(json.dumps(answer).encode() + b"\n")
        answers.flush()


def _answer(served: _Served, ask: _Ask) -> dict[str, Any]:
    from app.protocol.errors import BadInput

    try:
        answer = served.calls[ask["op"]](ask)
        json.dumps(answer)
    except BadInput as error:
        wrong = [[e.pointer, e.detail] for e in error.errors]
        return {"bad_input": error.detail[:2000], "errors": wrong[:20]}
    except MemoryError:
        return {"failed": "it needs more memory than limits.memory_mb allows"}
    except (KeyboardInterrupt, SystemExit) as error:
        return {"failed": f"it tried to end its process: {type(error).__name__}"}
    except Exception as error:  # noqa: BLE001 - the task is anybody's code, and its process goes on
        return {"failed": f"{type(error).__name__}: {error}"[:2000]}
    return answer


class _Served:
    """The loaded task."""

    def __init__(self, cut: list[str]) -> None:
        self._cut = cut
        self._task: Any = None
        self.calls: Mapping[str, Callable[[_Ask], dict[str, Any]]] = {
            "load": self._load,
            "size": self._size,
            "prompt": lambda ask: {"text": str(self._prompt(ask["split"], ask["index"]).text)},
            "reward": self._reward,
            "respond": self._respond,
        }
        self._prompt = functools.lru_cache(PROMPTS_KEPT)(self._look_up)

    def _load(self, ask: _Ask) -> dict[str, Any]:
        from app.protocol.task_spec import TaskSpec
        from app.tasks.base import is_deterministic, is_multi_turn
        from app.tasks.build import build

        task = build(TaskSpec.model_validate(ask["spec"]), ask["seed"], ask["folder"])
        self._task = task
        return {
            "name": str(task.name),
            "multi_turn": is_multi_turn(task),
            "deterministic": is_deterministic(task),
            "cut_off": self._cut,
        }

    def _size(self, ask: _Ask) -> dict[str, Any]:
        size = self._task.train_size if ask["split"] == "train" else self._task.heldout_size
        return {"size": int(size)}

    def _look_up(self, split: str, index: int) -> Any:
        return self._task.train(index) if split == "train" else self._task.heldout(index)

    def _reward(self, ask: _Ask) -> dict[str, Any]:
        from app.tasks.scoring import reward_of_turns

        prompt = self._prompt(ask["split"], ask["index"])
        return {"reward": float(reward_of_turns(self._task, prompt, ask["turns"]))}

    def _respond(self, ask: _Ask) -> dict[str, Any]:
        reply = self._task.respond(self._prompt(ask["split"], ask["index"]), ask["turns"])
        return {"text": None if reply is None else str(reply.text)}
