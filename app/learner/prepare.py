"""What has to be right before anything is rented: model, task, and that they go together.

Invariant: a job for which `prepare` returns can be trained; every reason why not is a BadInput or a LearnerError, and
all ranks come to know of it.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from app.learner.checkpoints import MARKER
from app.learner.config import LearnerSettings
from app.learner.evaluate import Evaluator
from app.learner.hub import hub_ref, plan
from app.learner.lora import add_adapter, merge, save_adapter
from app.learner.model import LoadedModel, assets, check_lengths, load, resolve
from app.learner.objects import open_objects
from app.learner.packing import check_job
from app.learner.parallel.messages import Loading
from app.learner.parallel.ranks import ALONE, Ranks
from app.learner.parallel.shards import needs_shards
from app.learner.trainer import GRPOTrainer
from app.protocol.errors import BadInput, EchoError, LearnerError
from app.protocol.job import JobSpec
from app.protocol.learner import AssetInfo, StartAnswer
from app.protocol.pruning import kept
from app.snapshots.manifest import ADAPTER_ASSET
from app.storage.objects import ObjectStore
from app.tasks.base import Task
from app.tasks.files import fetch_files
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
    files: list[Path]
    """The files that `assets` describes, without those of `later`."""
    later: list[Path]
    """Those that nodes get from the Hugging Face Hub, and from the store only once it fails them."""
    prompt: list[int]
    """Token ids of the first training prompt."""
    revision: str | None
    """The commit of a model from the Hugging Face Hub."""


def prepare(answer: StartAnswer, settings: LearnerSettings, ranks: Ranks = ALONE) -> Parts:
    """Load model and task, check that they go together, and measure a step. Raises BadInput, LearnerError.

    Rank 0 looks first; the others load only what has passed.
    """
    spec = answer.spec
    task = load_task(spec.task, spec.seed, task_files(answer, settings))
    if task.train_size < 1 or task.heldout_size < 1:
        raise BadInput(
            f"{task.name} has {task.train_size} training and {task.heldout_size} held-out prompts; raise size"
        )
    loaded = load_for(resolve(spec.model, settings.cache, revision=answer.model_revision), spec, ranks)
    prompts = [encode_prompt(loaded.tokenizer, task.train(i)) for i in range(min(_REHEARSAL_PROMPTS, task.train_size))]
    check_lengths(loaded.model, max(len(p) for p in prompts), spec.sampling.max_tokens)
    ref = hub_ref(spec.model, loaded.folder)
    revision = ref.revision if ref is not None else None
    same = Loading(spec=spec, revision=revision)
    ranks.announce("load", same.model_dump_json().encode())
    agree(ranks, None)
    trainer, evaluator = assemble(loaded, task, spec, ranks)
    prior = trainer.rehearse(
        spec.batch.prompts * kept(spec.batch.group_size, spec.batch.prune), prompts, spec.sampling.max_tokens
    )
    ways = plan(spec.model, loaded.folder, asset_files(loaded, settings.work_dir))
    return Parts(loaded, task, trainer, evaluator, ways.assets, prior, ways.now, ways.later, prompts[0], revision)


def task_files(answer: StartAnswer, settings: LearnerSettings) -> Path | None:
    """The task's files in the job's folder; None for a task without any. Raises IntegrityError, and what the store
    raises."""
    if not answer.spec.task.files:
        return None
    objects = open_objects(settings, answer)
    return fetch_files(objects.get_file, answer.job_id, answer.spec.task, settings.work_dir / "task")


def load_for(folder: Path, spec: JobSpec, ranks: Ranks) -> LoadedModel:
    """The model as this job trains it, with its adapter if it has one. In host memory if it will be cut into shards."""
    loaded = load(folder, device=torch.device("cpu") if needs_shards(spec.learner, ranks) else None)
    if spec.learner.lora is None:
        return loaded
    return replace(loaded, adapter=add_adapter(loaded.model, spec.learner.lora, name=spec.model, seed=spec.seed))


def assemble(loaded: LoadedModel, task: Task, spec: JobSpec, ranks: Ranks) -> tuple[GRPOTrainer, Evaluator]:
    """Trainer and evaluator of one rank. Collective. Raises BadInput for a model that can't be trained as asked."""
    trainer = GRPOTrainer(loaded.model, spec, ranks=ranks)
    check_job(loaded.model, spec.learner)
    return trainer, Evaluator(loaded.model, loaded.tokenizer, task, spec, ranks)


def agree(ranks: Ranks, failure: EchoError | None) -> None:
    """Tell the others whether this rank could load everything. Collective; raises LearnerError if one could not."""
    failed = ranks.total([float(failure is not None)])[0]
    if failed:
        raise LearnerError(f"{failed:.0f} of {ranks.size} ranks can't load the model or the task; their logs say why")


def asset_files(loaded: LoadedModel, work_dir: Path) -> list[Path]:
    """What a node needs beside what is published: config and tokenizer, and with an adapter the model under it."""
    # A model folder may hold a file of that name, and it would say that versions are adapters.
    files = [path for path in assets(loaded.folder) if path.name != ADAPTER_ASSET]
    if loaded.adapter is None:
        return files
    config = work_dir / ADAPTER_ASSET
    config.write_bytes(loaded.adapter)
    return [*files, *sorted(loaded.folder.glob("*.safetensors*")), config]


def put_assets(objects: ObjectStore, job_id: str, files: list[Path]) -> None:
    """Put files under `jobs/{job}/model/`."""
    for path in files:
        objects.put_file(f"jobs/{job_id}/model/{path.name}", path)


def put_final(objects: ObjectStore, prefix: str, parts: Parts, spec: JobSpec, folder: Path) -> None:
    """Save what was trained as a folder that `from_pretrained` (with an adapter: of PEFT) opens, under `prefix`.

    With `final_merged` the model with the adapter worked into it comes under `{prefix}merged/`, too.
    """
    shutil.rmtree(folder, ignore_errors=True)
    loaded, weights = parts.loaded, parts.trainer.weights()
    if loaded.adapter is None:
        loaded.model.save_pretrained(folder, state_dict=dict(weights))
    else:
        save_adapter(folder, loaded.adapter, weights)
    loaded.tokenizer.save_pretrained(folder)
    put_folder(objects, prefix, folder)
    if loaded.adapter is not None and spec.learner.final_merged:
        whole = folder.with_name("merged")
        shutil.rmtree(whole, ignore_errors=True)
        base = load(loaded.folder, device=torch.device("cpu")).model
        merge(base, loaded.adapter, weights)
        base.save_pretrained(whole)
        loaded.tokenizer.save_pretrained(whole)
        put_folder(objects, prefix + "merged/", whole)


def put_folder(objects: ObjectStore, prefix: str, folder: Path) -> None:
    """Put the files of a folder under `prefix`; a commit marker, if there is one, comes last."""
    for path in sorted(folder.iterdir(), key=lambda p: (p.name == MARKER, p.name)):
        objects.put_file(prefix + path.name, path)
