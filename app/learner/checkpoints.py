"""Checkpoints on local disk.

Invariant: a checkpoint counts only if its commit marker is there and every file has the size and hash that the marker
names; whatever instant a writer dies at, the previous checkpoint is still whole. No pickle: tensors are safetensors,
the rest is JSON.

`{root}/{step:09d}/`: model.safetensors, optimizer.safetensors (AdamW's moments and counters, `field/parameter`; with
`gac` or an adaptive S also the previous gradient, `gradient/parameter`), state.json, COMMIT. Written as `.part-…`,
flushed file by file, marker last, then renamed. What does not count any more is set aside as `{step:09d}.aside` until
the next one is written.
"""

from __future__ import annotations

import json
import logging
import shutil
import uuid
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from app.learner.adaptive import State
from app.learner.files import fsync_path, hash_file, write_durable
from app.protocol.base import Strict
from app.protocol.errors import LearnerError
from app.protocol.learner import EvalReport, StepReport

log = logging.getLogger(__name__)
MARKER = "COMMIT"
_RNG = "rng/torch"
_FILES = ("model.safetensors", "optimizer.safetensors", "state.json")
FORMAT: Final = 4
ASIDE = ".aside"


class Promise(Strict):
    """What a commit marker says of a file."""

    size: int
    blake3: str

    def kept(self, path: Path) -> bool:
        """Whether the file is the one that was committed. Raises OSError."""
        return path.stat().st_size == self.size and hash_file(path) == self.blake3


_PROMISES = TypeAdapter(dict[str, Promise])


def promises(marker: bytes) -> Mapping[str, Promise]:
    """What a commit marker says, by file name. Raises ValueError."""
    return _PROMISES.validate_json(marker)


class Progress(Strict):
    """Where the learner stands, apart from tensors."""

    model_config = ConfigDict(ser_json_inf_nan="constants")

    format: Literal[1, 2, 3, 4] = FORMAT
    """2 adds the best evaluation, 3 adaptive staleness and several candidates, 4 the previous gradient. What is lacking
    is made up for by defaults."""
    job_id: str
    step: int = Field(ge=0)
    active_s: float = Field(default=0, ge=0)
    """Seconds of the job so far, over all its processes."""
    evaluated: int = -1
    """The last step whose held-out reward is reported or among `evals`; −1 before the initial one."""
    steps: list[StepReport] = Field(default_factory=list)
    """Reports that the control service has not acknowledged."""
    evals: list[EvalReport] = Field(default_factory=list)
    best_step: int | None = Field(default=None, ge=0)
    """The step with the best held-out reward so far; its checkpoint stays."""
    best_reward: float | None = None
    candidate_step: int | None = Field(default=None, ge=0)
    """Before format 3: the only candidate."""
    candidates: tuple[int, ...] = ()
    """The versions that the fleet evaluates or will; their checkpoints stay until the results are known."""
    adaptive: State | None = None
    """Where adaptive staleness stands; None if S is fixed."""
    skipped: bool = False
    """Whether the last step changed nothing (`learner.gac`)."""

    @property
    def told(self) -> int:
        """The step up to which the control service had acknowledged all reports."""
        return self.step - len(self.steps)

    @property
    def undecided(self) -> tuple[int, ...]:
        """All candidates, whatever the format."""
        return self.candidates or (() if self.candidate_step is None else (self.candidate_step,))


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """`weights` and `optimizer` as the trainer names them; `rng` is torch's global CPU state."""

    progress: Progress
    weights: Mapping[str, torch.Tensor]
    optimizer: Mapping[str, torch.Tensor]
    rng: torch.Tensor


def save(root: Path, checkpoint: Checkpoint, *, keep: int = 2, after: Callable[[str], None] = lambda _: None) -> Path:
    """Write a checkpoint, replacing one of the same step, and remove all but the newest `keep`, the best and
    candidates, and leftovers.

    `after` is told the name of each file operation once it is done. Raises LearnerError when the disk refuses.
    """
    target = root / f"{checkpoint.progress.step:09d}"
    part = root / f".part-{uuid.uuid4().hex}"
    try:
        part.mkdir(parents=True)
        after("mkdir")
        _write(part, checkpoint, after)
        _swap(root, part, target, after)
        _prune(root, keep, {checkpoint.progress.step, checkpoint.progress.best_step, *checkpoint.progress.undecided})
    except (OSError, SafetensorError) as error:
        raise LearnerError(f"the checkpoint of step {checkpoint.progress.step} can't be written: {error}") from error
    return target


def steps_on_disk(root: Path) -> list[int]:
    """Steps of the checkpoints that are committed, newest first; whether they are whole shows when they are read."""
    return [int(folder.name) for folder in _committed(root) if folder.suffix != ".old"]


def weights_of(root: Path, step: int) -> Mapping[str, torch.Tensor]:
    """The weights of one checkpoint. Raises LearnerError if it is not whole."""
    folder = root / f"{step:09d}"
    try:
        return _read(folder).weights
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise LearnerError(f"checkpoint {folder} is damaged: {error}") from error


def latest(root: Path, *, job_id: str, last_step: int | None = None) -> Checkpoint | None:
    """The newest whole checkpoint; None if there is none.

    Damaged ones are set aside, so that they count no more, and so are those of a course that was left: the control
    service, which has `last_step` steps on record, knows nothing of steps that they take for acknowledged. Raises
    LearnerError if one is of another job or was written by a newer program.
    """
    for folder in _committed(root):
        try:
            checkpoint = _read(folder)
        except (OSError, ValueError, KeyError, SafetensorError) as error:
            log.warning("checkpoint %s is damaged and set aside: %s", folder, error)
            _set_aside(folder)
            continue
        if checkpoint.progress.job_id != job_id:
            raise LearnerError(f"checkpoint {folder} is of job {checkpoint.progress.job_id}, not {job_id}")
        if left := why_left(checkpoint.progress, last_step):
            log.warning("checkpoint %s is set aside: %s", folder, left)
            _set_aside(folder)
            continue
        return checkpoint
    return None


def why_left(progress: Progress, last_step: int | None) -> str:
    """Why the course of a checkpoint was left, by the steps that the control service has on record; empty if not."""
    if last_step is None or progress.told <= last_step:
        return ""
    return (
        f"by it step {progress.told} is on record, but the control service knows {last_step} steps: another learner "
        "has gone on from an older checkpoint since"
    )


def progress_of(state: bytes) -> Progress:
    """What a state.json says. Raises ValueError if it is none, LearnerError if a newer program wrote it: that one is
    whole, and to go back behind it would lose it."""
    found = json.loads(state)
    number = found.get("format") if isinstance(found, dict) else None
    if isinstance(number, int) and number > FORMAT:
        raise LearnerError(
            f"the checkpoint of step {found.get('step')} has format {number}, and this learner reads formats up to "
            f"{FORMAT}: a newer Echo2 wrote it; start that one, or remove the checkpoint to go on from the one before"
        )
    try:
        return Progress.model_validate(found)
    except ValidationError as error:
        raise ValueError(f"state.json has another format: {error.error_count()} errors") from error


def set_aside(root: Path) -> int:
    """How many checkpoints do not count any more and are still there."""
    return sum(path.suffix == ASIDE for path in root.iterdir()) if root.is_dir() else 0


def expected(root: Path, *, job_id: str, last_step: int, published_version: int | None) -> Checkpoint | None:
    """Like `latest`, but no checkpoint is an error when the control service knows of steps or a published version, and
    when there were some and none of them counts.

    Training from the start again without a word would throw away what was paid for.
    """
    checkpoint = latest(root, job_id=job_id, last_step=last_step)
    if checkpoint is not None:
        return checkpoint
    if aside := set_aside(root):
        raise LearnerError(
            f"all {aside} checkpoints in {root} are damaged or of a course that was left; restore one or start a new "
            "job"
        )
    if last_step > 0 or (published_version or 0) > 0:
        raise LearnerError(
            f"the job is at step {last_step} with v{published_version} published, but {root} holds no checkpoint; "
            "start the learner where its ECHO2_STATE_DIR is, or start a new job"
        )
    return None


def _set_aside(folder: Path) -> None:
    target = folder.with_name(folder.name + ASIDE)
    shutil.rmtree(target, ignore_errors=True)
    try:
        folder.rename(target)
    except OSError as error:
        raise LearnerError(f"checkpoint {folder} does not count and can't be set aside: {error}") from error


def _write(part: Path, checkpoint: Checkpoint, after: Callable[[str], None]) -> None:
    tensors = {
        "model.safetensors": dict(checkpoint.weights),
        "optimizer.safetensors": {**checkpoint.optimizer, _RNG: checkpoint.rng},
    }
    for name, content in tensors.items():
        save_file({k: v.contiguous() for k, v in content.items()}, part / name)
        fsync_path(part / name)
        after(name)
    write_durable(part / "state.json", checkpoint.progress.model_dump_json().encode())
    after("state.json")
    hashes = {name: Promise(size=(part / name).stat().st_size, blake3=hash_file(part / name)) for name in _FILES}
    write_durable(part / MARKER, _PROMISES.dump_json(hashes))
    after(MARKER)
    fsync_path(part)


def _swap(root: Path, part: Path, target: Path, after: Callable[[str], None]) -> None:
    if target.exists():
        # A folder can't be replaced by rename; the one that goes is kept under a name that still counts until then.
        old = root / f"{target.name}.old"
        shutil.rmtree(old, ignore_errors=True)
        target.rename(old)
        after("set aside")
    part.rename(target)
    after("rename")
    fsync_path(root)


def _prune(root: Path, keep: int, wanted: Set[int | None]) -> None:
    whole = [folder for folder in _committed(root) if folder.suffix != ".old"]
    kept = {*whole[:keep], *(folder for folder in whole if int(folder.name) in wanted)}
    for path in root.iterdir():
        if path.is_dir() and path not in kept:
            shutil.rmtree(path, ignore_errors=True)


def _committed(root: Path) -> list[Path]:
    """Folders with a marker, newest first; of one step, the set-aside copy after the new one."""
    if not root.is_dir():
        return []
    folders = [p for p in root.iterdir() if p.name.removesuffix(".old").isdigit() and (p / MARKER).is_file()]
    return sorted(folders, key=lambda p: (int(p.name.removesuffix(".old")), p.suffix != ".old"), reverse=True)


def _read(folder: Path) -> Checkpoint:
    marker = promises((folder / MARKER).read_bytes())
    for name in _FILES:
        if not marker[name].kept(folder / name):
            raise ValueError(f"{name} is not the file that was committed")
    progress = progress_of((folder / "state.json").read_bytes())
    optimizer = load_file(folder / "optimizer.safetensors")
    rng = optimizer.pop(_RNG)
    return Checkpoint(progress, load_file(folder / "model.safetensors"), optimizer, rng)
