"""What torchrun runs for test_parallel.py: cases of some steps on made-up groups; rank 0 writes what came out.

`torchrun --nproc-per-node N -m tests.integration.learner.rank_steps OUT CASES`, CASES a JSON file: name → Case.
"""

from __future__ import annotations

import json
import sys
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch.distributed.tensor import DTensor

from app.learner.buffer import Group
from app.learner.lora import add_adapter
from app.learner.packing import check_packing
from app.learner.parallel.follow import serve
from app.learner.parallel.launch import launch, leave
from app.learner.parallel.messages import Sampling
from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.parallel.ranks import Group as RankGroup
from app.learner.parallel.shards import blocks
from app.learner.trainer import GRPOTrainer, TrainerState
from app.protocol.errors import LearnerError
from tests.unit.learner.samples import batch, group, job, random_model
from tests.unit.learner.test_foreign_tokens import dialogues
from tests.unit.learner.test_trainer import near_policy


@dataclass
class Case:
    """`learner`: fields that differ; `start`: a folder with the state to go on from; `steps`: which batches; `broken`:
    a weight is infinite."""

    learner: dict[str, Any] = field(default_factory=dict)
    start: str = ""
    steps: list[int] = field(default_factory=lambda: [0, 1, 2])
    broken: bool = False


def batches() -> list[list[Group]]:
    """The last one has a signal in a single row more than nothing: fewer rows than ranks is a case of its own."""
    silent = [group(f"s{i}", rewards=(1.0,) * 4) for i in range(3)]
    one = [group("one", rewards=(0.0, 1.0)), *silent]
    made = [near_policy(1), near_policy(2), one, batch(4), silent, dialogues(5)]
    return [[replace(g, node=f"n{i % 3}") for i, g in enumerate(groups)] for groups in made]


def trainer_for(case: Case, ranks: Ranks) -> GRPOTrainer:
    """On the model that every rank makes alike."""
    spec, model = job(learner={"learning_rate": 1e-3, **case.learner}), random_model()
    if case.broken:
        model.model.norm.weight.data[0] = torch.inf
    if spec.learner.lora is not None:
        add_adapter(model, spec.learner.lora, name="tiny", seed=1)
    trainer = GRPOTrainer(model, spec, ranks=ranks)
    if spec.learner.packing:
        check_packing(model, close=1e-3)
    return trainer


def pass_of_all(trainer: GRPOTrainer) -> int:
    """A forward pass alone; how many tensors of the layers are whole after it. Collective."""
    with torch.no_grad():
        trainer.model(input_ids=torch.tensor([[3, 1, 4]]))
    return sum(not isinstance(p, DTensor) for layer in blocks(trainer.model) for p in layer.parameters())


def play(case: Case, ranks: Ranks, out: Path) -> None:
    """Rank 0: make the steps and write state, values and failure into a folder."""
    trainer, failure, values = trainer_for(case, ranks), "", []
    if case.start:
        saved = json.loads((Path(case.start) / "told.json").read_text())
        trainer.restore(
            TrainerState(
                saved["steps"],
                load_file(Path(case.start) / "weights.safetensors"),
                load_file(Path(case.start) / "optimizer.safetensors"),
                saved["skipped"],
            )
        )
    made, prior = batches(), 1.0
    try:
        if not case.broken:
            prior = trainer.rehearse(40, [[1, 2, 3], [4, 5]], 6)
        values = [trainer.step(made[i]).values for i in case.steps]
    except LearnerError as error:
        failure = error.detail
    ranks.announce("sample", Sampling(prompts=[], max_tokens=1).model_dump_json().encode())
    whole = pass_of_all(trainer)
    state = trainer.state()
    # A version that comes without a checkpoint.
    published = trainer.snapshot(optimizer=False).weights
    ranks.announce("end")
    assert published.keys() == state.weights.keys()
    assert all(torch.equal(t, state.weights[n]) for n, t in published.items())
    out.mkdir()
    save_file(dict(state.weights), out / "weights.safetensors")
    save_file(dict(state.optimizer), out / "optimizer.safetensors")
    told = {"steps": state.steps, "values": values, "prior": prior, "failure": failure}
    told |= {"skipped": state.skipped, "whole": whole}
    (out / "told.json").write_text(json.dumps(told))


def main(out: Path, cases: dict[str, Case]) -> None:
    """All cases, one after the other, by the same processes."""
    torch.set_num_threads(1)
    ranks = launch(60.0)
    for name, case in cases.items():
        if isinstance(ranks, RankGroup) and ranks.rank != 0:
            trainer = trainer_for(case, ranks)
            serve(ranks, trainer, lambda prompts, most, trainer=trainer: pass_of_all(trainer))
        else:
            play(case, ranks, out / name)
    leave(ranks)


def write(cases: dict[str, Case], path: Path) -> None:
    """The file that `main` is given."""
    path.write_text(json.dumps({name: asdict(case) for name, case in cases.items()}))


__all__ = ["ALONE", "Case", "batches", "play", "trainer_for", "write"]

if __name__ == "__main__":
    given = json.loads(Path(sys.argv[2]).read_text())
    main(Path(sys.argv[1]), {name: Case(**case) for name, case in given.items()})
