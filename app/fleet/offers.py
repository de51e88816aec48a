"""Offers as the API shows them: every part of the price, where the throughput comes from, and for whom they are ranked.

Invariant: nothing is decided here, and what is shown is what the decision used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from app.fleet.estimates import Workload
from app.fleet.priced import JobView, Priced
from app.fleet.pricing import Traffic
from app.protocol.base import usd
from app.protocol.job import JobSpec
from app.protocol.task_spec import TaskSpec

DEFAULT_PARAMETERS = 8_000_000_000
DEFAULT_TOKENS = 1024.0
DEFAULT_PUBLISH_S = 600.0
MODEL_BYTES = 2


def default_view(benched: Mapping[str, float]) -> JobView:
    """Whom offers are ranked for when no job is named: an 8B model in bf16, a full snapshot every ten minutes."""
    spec = JobSpec(model="tiny", task=TaskSpec(name="reasoning_gym"), budget_usd="1")
    model = float(MODEL_BYTES * DEFAULT_PARAMETERS)
    hourly = model * 3600 / DEFAULT_PUBLISH_S
    load = Workload(DEFAULT_PARAMETERS, DEFAULT_TOKENS, benched=benched)
    return JobView(spec, load, Traffic(hourly, hourly), model_bytes=model)


def ranked_for(view: JobView, job_id: str | None) -> dict[str, Any]:
    """What the ranking rests on."""
    model = f"{view.load.parameters / 1e9:.3g}B parameters, {view.load.tokens_per_rollout:g} tokens per rollout"
    who = job_id if job_id else "an assumed job, since none was named"
    return {
        "job_id": job_id,
        "text": f"ranked for {who}: {model}; {view.traffic.down_bytes_h / 1e9:.3g} GB/h of snapshots down and "
        f"{view.traffic.up_bytes_h / 1e9:.3g} GB/h up",
        "parameters": view.load.parameters,
        "tokens_per_rollout": view.load.tokens_per_rollout,
        "interruptible": view.spec.fleet.interruptible,
        "disk_gb": view.spec.fleet.disk_gb,
        "download_bytes_per_hour": view.traffic.down_bytes_h,
        "upload_bytes_per_hour": view.traffic.up_bytes_h,
        "model_bytes": view.model_bytes,
        "image_bytes": dict(view.image_bytes),
    }


def offer_view(p: Priced) -> dict[str, Any]:
    """One offer as a job sees it."""
    o = p.offer
    return {
        "provider": o.provider,
        "offer_id": o.offer_id,
        "machine_id": o.machine_id,
        "gpu_name": o.gpu_name,
        "num_gpus": o.num_gpus,
        "region": o.region,
        "billing": o.billing.value,
        "reliability": o.reliability,
        "note": o.raw_status or None,
        "price_per_hour": usd(p.rate_micros_h),
        "on_demand_per_hour": None if p.on_demand is None else usd(p.on_demand),
        "effective_price_per_hour": usd(p.price.total),
        "price_parts": {
            "rent": usd(p.price.compute),
            "disk": usd(p.price.disk),
            "download": usd(p.price.download),
            "upload": usd(p.price.upload),
            "startup": usd(p.price.startup),
            "total": usd(p.price.total),
        },
        "life_hours": p.price.life_h,
        "start_seconds": p.price.start_s,
        "mu": p.mu,
        "mu_estimate": p.estimate.mu,
        "mu_source": p.estimate.source,
        "availability": p.availability,
        # Infinity is not JSON.
        "rho": p.rho if math.isfinite(p.rho) else None,
        "excluded": p.excluded or None,
    }


TEXT_COLUMNS = (
    "offer_id", "provider", "gpu_name", "num_gpus", "region", "billing", "rent", "disk", "download", "upload",
    "startup", "total", "life_h", "start_s", "mu", "mu_source", "availability", "rho", "excluded",
)  # fmt: skip


def text_row(row: dict[str, Any]) -> dict[str, Any]:
    """The same for a table: parts as columns, hours and seconds rounded."""
    return {**row, **row["price_parts"], "life_h": round(row["life_hours"], 2), "start_s": round(row["start_seconds"])}
