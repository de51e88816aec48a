"""Machines that were measured by hand (`echo2 bench-node --json`), as corrections of what data sheets promise.

Invariant: a measurement corrects the machines of its own GPU model and no others; a line that can't be read stops the
start with its number instead of being left out.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from app.fleet.estimates import Workload, reference, roofline
from app.settings import SettingsError


class Bench(BaseModel):
    """What is read of a line; the rest of it is for people."""

    model_config = ConfigDict(extra="ignore", frozen=True, allow_inf_nan=False)

    gpu_name: str = Field(min_length=1, max_length=200)
    num_gpus: int = Field(ge=1, le=1024)
    parameters: int = Field(ge=1)
    concurrency: int = Field(ge=1)
    tokens_per_s: float = Field(gt=0)


def parse(text: str, source: str) -> list[Bench]:
    """JSON lines; empty ones are passed over. Raises SettingsError that names `source` and the line."""
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        try:
            found.append(Bench.model_validate_json(line))
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(map(str, first["loc"])) or "the line"
            what = f"{where}: {first['msg']}; expected what `echo2 bench-node --json` prints"
            raise SettingsError(f"{source} line {number}: {what}") from None
    return found


def corrections(benches: Iterable[Bench]) -> Mapping[str, float]:
    """GPU model → measured over promised speed, a geometric mean over its measurements."""
    logs: dict[str, list[float]] = {}
    for bench in benches:
        load = Workload(bench.parameters, 1.0, bench.concurrency)
        key, gpu = reference(bench.gpu_name)
        logs.setdefault(key, []).append(math.log(bench.tokens_per_s / roofline(gpu, bench.num_gpus, load)))
    return {key: math.exp(sum(values) / len(values)) for key, values in logs.items()}


def read(path: Path | None) -> Mapping[str, float]:
    """Corrections from a file; none without one. Raises SettingsError."""
    if path is None:
        return {}
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise SettingsError(f"ECHO2_PRIORS_FILE {path} can't be read: {error}") from None
    return corrections(parse(text, f"ECHO2_PRIORS_FILE {path}"))
