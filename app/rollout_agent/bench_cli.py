"""`echo2 bench-node` put together: settings, engine, model, and how the result is shown."""

from __future__ import annotations

import asyncio
import json
import tempfile
from collections.abc import Sequence
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from app.rollout_agent.bench_model import prepare
from app.rollout_agent.bench_node import Measured, measure, short_name, with_links
from app.rollout_agent.choice import engine_for, has_vllm
from app.rollout_agent.config import load_settings
from app.rollout_agent.engines.registry import choose_device, gpu_name, make_engine
from app.rollout_agent.facts import machine_facts, open_nvml

NOBODY = {"control_url": "http://127.0.0.1", "join_token": "none"}
"""An agent can't be set up without these; nothing is asked of them here."""
WIDTH = 100


def run(
    model: str, engine: str | None, concurrencies: Sequence[int], max_tokens: int, *, gpu_name: str,
    urls: tuple[str | None, str | None], as_json: bool,
) -> str:  # fmt: skip
    """Measure, and say what came of it. Raises BadInput for an engine or a model that is none, Unfit for nonsense."""
    measured = asyncio.run(_measure(model, engine, concurrencies, max_tokens, gpu_name, urls))
    return json.dumps(measured.as_dict()) if as_json else shown(measured)


async def _measure(
    model: str, engine: str | None, concurrencies: Sequence[int], max_tokens: int, name: str,
    urls: tuple[str | None, str | None],
) -> Measured:  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="echo2-bench-") as folder:
        given = {**NOBODY, "agent_dir": Path(folder) / "agent", **({} if engine is None else {"engine": engine})}
        settings = load_settings(**given)
        facts = await asyncio.to_thread(machine_facts, settings.agent_dir, open_nvml())
        device = choose_device(settings.device)
        chosen = engine_for(settings.engine, facts, on_gpu=device == "cuda", has_vllm=has_vllm(settings))
        settings = settings.model_copy(update={"engine": chosen})
        found = facts.gpus[0].name if facts.gpus else gpu_name() if device == "cuda" else "CPU"
        made = make_engine(settings)
        prepared = await asyncio.to_thread(prepare, model, Path(folder))
        measured = await measure(
            made, prepared, concurrencies=concurrencies, max_tokens=max_tokens, name=settings.engine, title=model,
            gpu_name=name or short_name(found), facts=facts, settings=settings,
        )  # fmt: skip
    return await with_links(measured, *urls)


def shown(measured: Measured) -> str:
    """The result for people."""
    out = StringIO()
    console = Console(file=out, width=WIDTH, highlight=False)
    console.print(
        f"{measured.num_gpus} × {measured.gpu_name}, {measured.engine}, {measured.model} "
        f"({measured.parameters / 1e6:.4g} M parameters), up to {measured.max_tokens} tokens each"
    )
    table = Table()
    for column in ("completions at once", "tokens", "seconds", "tokens/s"):
        table.add_column(column, justify="right")
    for row in measured.rows:
        table.add_row(str(row.concurrency), str(row.tokens), f"{row.seconds:.3f}", f"{row.tokens_per_s:.5g}")
    console.print(table)
    console.print(
        f"engine loaded in {measured.load_s:.2f} s; a version of {measured.snapshot_bytes / 1e6:.4g} MB swapped in "
        f"{measured.swap_s:.3f} s"
    )
    for way, rate in (("down", measured.down_mbps), ("up", measured.up_mbps)):
        if rate is not None:
            console.print(f"{way}link: {rate:.4g} Mbit/s")
    for note in measured.notes:
        console.print(note)
    return out.getvalue().rstrip()
