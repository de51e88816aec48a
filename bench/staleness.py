"""What staleness costs, by loss: real GRPO on the tiny model, with the lag made up instead of waited for.

One process and one thread. A step trains on rollouts that are sampled on the spot from a kept copy of the weights of an
earlier version, so that the lag is exactly what the schedule says and a run is the same on every machine of one kind:

* `const`: every batch of step t is from v_{t−S}, the worst that the budget allows;
* `echo`: a version is published every κ = max(1, S − 1) steps and is in use one step later, so that the lag goes 2 … S
  over and over (S = 1: always 1);
* `adaptive`: like echo, with an S that the job's controller moves (`app/learner/adaptive.py`) and never above the given
  one. Its mean is in the run as `mean_staleness`.

Losses are those of `learner.loss`, and `uncorrected`: GRPO that takes the learner's own log-probs for the sampler's, so
that nothing corrects for staleness. Unlike a fleet's nodes the sampler uses the weights in float32.

Writes `runs.jsonl` (a run that is there already is not made again), `table.md` and `staleness.png` into --out. The last
line is one JSON object.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from app.learner.buffer import Group
from app.learner.evaluate import Evaluator
from app.learner.microbatch import Row, collate, completion_logprobs, split
from app.learner.model import LoadedModel, load, unique_weights
from app.learner.optimizer import BETAS
from app.learner.sampling import eos_ids, sample
from app.learner.tiny import tiny_model
from app.protocol.job import JobSpec
from app.protocol.trajectory import Rollout
from app.tasks.base import Task
from app.tasks.prompts import decode, encode_prompt
from app.tasks.registry import load_task
from bench.staleness_lags import Timetable
from bench.staleness_options import options
from bench.staleness_report import UNCORRECTED, cells, plot, table
from bench.staleness_variants import StepSize, StudyTrainer

TAIL = 20
"""Steps at the end over which a run's numbers are averaged."""
_BEFORE: dict[str, Any] = {
    "learner": {},
    "max_mismatch_kl": None,
    "first": None,
    "step_size": "constant",
    "beta1": BETAS[0],
}
"""What runs were made with that don't say."""


@dataclass(frozen=True, slots=True)
class Plan:
    """One run."""

    loss: str
    schedule: str
    staleness: int
    seed: int
    steps: int
    learning_rate: float
    scale_rewards: str | None
    eval_prompts: int
    learner: dict[str, Any] = dataclasses.field(default_factory=dict)
    """Further fields of the job's `learner`."""
    max_mismatch_kl: float | None = None
    first: int | None = None
    """The S that an adaptive one begins with."""
    step_size: StepSize = "constant"
    beta1: float = BETAS[0]

    @property
    def spec(self) -> JobSpec:
        """The job: the demo's task and batch."""
        return JobSpec.model_validate(
            {
                "model": "tiny",
                "task": {
                    "name": "reasoning_gym",
                    "params": {"dataset": "spell_backward", "min_word_len": 3, "max_word_len": 5},
                },
                "budget_usd": "1",
                "staleness": {"max": self.staleness, "adaptive": self.schedule == "adaptive"}
                | ({} if self.max_mismatch_kl is None else {"max_mismatch_kl": self.max_mismatch_kl}),
                "sampling": {"max_tokens": 8},
                "learner": {
                    "learning_rate": self.learning_rate,
                    "loss": "ppo_clip" if self.loss == UNCORRECTED else self.loss,
                    "scale_rewards": self.scale_rewards,
                    "eval_prompts": self.eval_prompts,
                    **self.learner,
                },
                "seed": self.seed,
            }
        )


class Sampler:
    """Rollouts of old versions."""

    def __init__(self, plan: Plan, loaded: LoadedModel, task: Task) -> None:
        self._plan = plan
        self._spec = plan.spec
        self._loaded = loaded
        self._task = task
        self._model = copy.deepcopy(loaded.model)
        self._eos = eos_ids(loaded.model, loaded.tokenizer)
        self._kept: dict[int, dict[str, torch.Tensor]] = {}

    def keep(self, version: int) -> None:
        """Remember the learner's weights as v_version, and forget what can't be asked for any more."""
        self._kept[version] = {n: t.detach().clone() for n, t in unique_weights(self._loaded.model).items()}
        self._kept.pop(version - self._plan.staleness - 1, None)

    def batch(self, t: int, version: int) -> list[Group]:
        """The batch of step t. Prompts and draws depend on seed and t alone."""
        weights = unique_weights(self._model)
        with torch.no_grad():
            for name, tensor in self._kept[version].items():
                weights[name].copy_(tensor)
        batch, size = self._spec.batch, self._task.train_size
        chosen = random.Random(f"{self._plan.seed} {t}").sample(range(size), batch.prompts)
        prompts = [self._task.train(i) for i in chosen]
        ids = [encode_prompt(self._loaded.tokenizer, p) for p in prompts]
        made = sample(
            self._model,
            [p for p in ids for _ in range(batch.group_size)],
            max_tokens=self._spec.sampling.max_tokens,
            temperature=self._spec.sampling.temperature,
            eos=self._eos,
            generator=torch.Generator().manual_seed(self._plan.seed * 1_000_003 + t),
        )
        groups = []
        for number, (prompt, prompt_ids) in enumerate(zip(prompts, ids, strict=True)):
            answers = made[number * batch.group_size : (number + 1) * batch.group_size]
            name = f"{t}-{number}"
            rollouts = [
                Rollout(
                    name,
                    prompt.index,
                    i,
                    prompt_ids,
                    c.ids,
                    c.logprobs,
                    [version],
                    [0],
                    self._task.reward(prompt, decode(self._loaded.tokenizer, c.ids)),
                    c.finish_reason,
                )
                for i, c in enumerate(answers)
            ]
            groups.append(Group(name, tuple(rollouts)))
        return groups


@torch.no_grad()
def forgetful(model: Any, groups: Sequence[Group]) -> list[Group]:
    """The groups with the learner's own log-probs in place of the sampler's."""
    flat = [r for g in groups for r in g.rollouts]
    rows = [Row(r.prompt_ids, r.completion_ids, r.logprobs, 0.0, [0] * len(r.completion_ids)) for r in flat]
    own: dict[int, list[float]] = {}
    for order in split([r.length for r in rows], 16_384):
        found = completion_logprobs(model, collate([rows[i] for i in order], model.device), 1.0).tolist()
        for i in order:
            own[i], found = found[: len(flat[i].completion_ids)], found[len(flat[i].completion_ids) :]
    changed = iter([dataclasses.replace(r, logprobs=own[i]) for i, r in enumerate(flat)])
    return [Group(g.work_item, tuple(next(changed) for _ in g.rollouts)) for g in groups]


def run(plan: Plan, folder: Path, task: Task, clock: Callable[[], float] = time.process_time) -> dict[str, Any]:
    """Train; what came of it."""
    began = clock()
    loaded = load(folder, device=torch.device("cpu"))
    trainer = StudyTrainer(loaded.model, plan.spec, step_size=plan.step_size, beta1=plan.beta1)
    evaluator = Evaluator(loaded.model, loaded.tokenizer, task, plan.spec)
    sampler = Sampler(plan, loaded, task)
    start, history, timetable = evaluator.run(), [], Timetable(plan.schedule, plan.spec, plan.first)
    for t in range(plan.steps):
        sampler.keep(t)
        version = timetable.version(t)
        groups = sampler.batch(t, version)
        if plan.loss == UNCORRECTED:
            groups = forgetful(loaded.model, groups)
        trainer.lag = t - version
        history.append(trainer.step(groups).values)
        timetable.after(history[-1], t - version)
    tail = history[-TAIL:]
    return dataclasses.asdict(plan) | {
        "start": start,
        "heldout": evaluator.run(),
        "train_reward": [round(h["reward"], 4) for h in history],
        "ess": statistics.fmean(h["ess"] for h in tail),
        "log_ratio_squared": statistics.fmean(h["log_ratio_squared"] for h in tail),
        "clip_share": statistics.fmean(h["clip_share"] for h in tail),
        "mean_staleness": statistics.fmean(timetable.staleness[: plan.steps]),
        "cpu_s": round(clock() - began, 1),
    }


def plans(args: argparse.Namespace) -> list[Plan]:
    """All runs that are asked for; one seed after the other, so that a study that is cut short has whole seeds."""
    return [
        Plan(
            loss,
            schedule,
            s,
            seed,
            args.steps,
            args.learning_rate,
            args.scale_rewards,
            args.eval_prompts,
            args.learner,
            args.max_mismatch_kl,
            args.adaptive_start,
            args.step_size,
            args.beta1,
        )
        for seed in args.seeds
        for schedule, loss, s in cells_of(args)
    ]


def cells_of(args: argparse.Namespace) -> list[tuple[str, str, int]]:
    """(schedule, loss, S) of every run of a seed. S adapts only by what a correction measures."""
    asked = [(schedule, loss, s) for schedule in args.schedules for loss in args.losses for s in args.staleness]
    adaptive = [("adaptive", loss, s) for loss in args.losses if loss != UNCORRECTED for s in args.adaptive]
    return list(dict.fromkeys([*asked, *adaptive]))


def study(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Make the runs that are missing, unless only a report is wanted; all that were asked for and are there."""
    args.out.mkdir(parents=True, exist_ok=True)
    log = args.out / "runs.jsonl"
    done = [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []
    wanted: list[dict[str, Any]] = []
    for plan in plans(args):
        key = dataclasses.asdict(plan)
        found = next((r for r in done if all((_BEFORE | r)[k] == v for k, v in key.items())), None)
        if found is None and args.report_only:
            continue
        if found is None:
            found = run(plan, tiny_model(args.cache), load_task(plan.spec.task, plan.seed))
            with log.open("a") as file:
                file.write(json.dumps(found) + "\n")
        wanted.append(found)
        last = statistics.fmean(found["train_reward"][-TAIL:])
        print(
            f"{plan.schedule} {plan.loss} S={plan.staleness} seed={plan.seed}: {found['heldout']:.3f}, last {TAIL} "
            f"batches {last:.3f}, mean S {found['mean_staleness']:.1f}",
            flush=True,
        )
    return wanted


def main(argv: Sequence[str] | None = None) -> int:
    """Entry of `python -m bench.staleness`."""
    from transformers.utils.logging import disable_progress_bar

    parser = options((__doc__ or "").partition("\n")[0])
    args = parser.parse_args(argv)
    if args.steps < 1 or args.eval_prompts < 1:
        parser.error("--steps and --eval-prompts must be at least 1")
    try:
        _ = [plan.spec for plan in plans(args)]
    except ValueError as error:
        parser.error(f"there is no such job: {error}")
    torch.set_num_threads(1)
    disable_progress_bar()
    began = time.monotonic()
    runs = study(args)
    if not runs:
        parser.error("there are no such runs")
    (args.out / "table.md").write_text(table(runs))
    plot(runs, args.out / "staleness.png")
    print(table(runs))
    heldout = {
        f"{schedule}/{loss}/{s}": round(statistics.fmean(r["heldout"] for r in same), 4)
        for schedule, loss, s, same in cells(runs)
    }
    print(json.dumps({"heldout": heldout, "runs": len(runs), "wall_s": round(time.monotonic() - began, 1)}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
