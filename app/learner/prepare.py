"""What has to be right before anything is rented: model, task, and that they go together.

Invariant: a job for which `prepare` returns can be trained; every reason why not is a BadInput or a LearnerError.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass
from pathlib import Path

from app.learner.checkpoints import MARKER
from app.learner.config import LearnerSettings
from app.learner.evaluate import Evaluator
from app.learner.model import LoadedModel, assets, check_lengths, load, resolve
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput
from app.protocol.learner import AssetInfo, StartAnswer
from app.storage.objects import ObjectStore
from app.tasks.base import Task
from app.tasks.prompts import encode_prompt
from app.tasks.registry import load_task

_REHEARSAL_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class Parts:
    """What a job needs before training: all that only loading can show to be right."""

    loaded: LoadedModel
    task: Task
    trainer: GRPOTrainer
    evaluator: Evaluator
    assets: list[AssetInfo]
    t_train_prior: float


def prepare(answer: StartAnswer, settings: LearnerSettings) -> Parts:
    """Load model and task, check that they go together, and measure a step. Raises BadInput, LearnerError."""
    spec = answer.spec
    task = load_task(spec.task, spec.seed)
    if task.train_size < 1 or task.heldout_size < 1:
        raise BadInput(
            f"{task.name} has {task.train_size} training and {task.heldout_size} held-out prompts; raise size"
        )
    loaded = load(resolve(spec.model, settings.cache))
    prompts = [encode_prompt(loaded.tokenizer, task.train(i)) for i in range(min(_REHEARSAL_PROMPTS, task.train_size))]
    check_lengths(loaded.model, max(len(p) for p in prompts), spec.sampling.max_tokens)
    trainer = GRPOTrainer(loaded.model, spec)
    prior = trainer.rehearse(spec.rollouts_per_step, prompts, spec.sampling.max_tokens)
    evaluator = Evaluator(loaded.model, loaded.tokenizer, task, spec)
    return Parts(loaded, task, trainer, evaluator, assets(loaded.folder), prior)


def put_assets(objects: ObjectStore, job_id: str, folder: Path, found: list[AssetInfo]) -> None:
    """Put config and tokenizer under `jobs/{job}/model/`."""
    for asset in found:
        objects.put_file(f"jobs/{job_id}/model/{asset.path}", folder / asset.path)


def put_final(objects: ObjectStore, prefix: str, loaded: LoadedModel, folder: Path) -> None:
    """Save the trained model as a folder that `from_pretrained` opens and put its files under `prefix`."""
    shutil.rmtree(folder, ignore_errors=True)
    loaded.model.save_pretrained(folder)
    loaded.tokenizer.save_pretrained(folder)
    put_folder(objects, prefix, folder)


def put_folder(objects: ObjectStore, prefix: str, folder: Path) -> None:
    """Put the files of a folder under `prefix`; a commit marker, if there is one, comes last."""
    for path in sorted(folder.iterdir(), key=lambda p: (p.name == MARKER, p.name)):
        objects.put_file(prefix + path.name, path)
