"""Own machines in the shapes of `providers.base`: offers and instances.

Invariant: pure; a machine that can't be reached is UNKNOWN, never free and never gone.
"""

from __future__ import annotations

import hashlib
from datetime import UTC, datetime

from providers.base import Billing, Instance, Offer, OfferQuery, Phase, ProviderError, RentSpec

from .machines import Machine
from .scripts import Seen
from .state import Taken


def _key(name: str) -> str:
    return " ".join(name.replace("_", " ").split()).casefold()


def instance_id_of(machine: str, label: str) -> str:
    """The same machine and label are the same instance."""
    return f"{machine}~{hashlib.sha256(label.encode()).hexdigest()[:16]}"


def passes(machine: Machine, query: OfferQuery) -> bool:
    """Whether a machine is one that `query` asks for, whatever runs on it."""
    names = {_key(name) for name in query.gpu_names}
    most = query.max_compute_micros_h
    return (
        (not names or _key(machine.gpu_name) in names)
        and (most is None or machine.price_micros_h <= most)
        and machine.reliability >= query.min_reliability
        and query.min_ports <= (1 if machine.relay_port else 0)
    )


def offer(machine: Machine, provider: str, now: datetime) -> Offer:
    """A machine as it is offered: at its fixed price, with one port if it has a relay port."""
    return Offer(
        provider=provider, offer_id=machine.name, machine_id=machine.name, gpu_name=machine.gpu_name,
        num_gpus=machine.num_gpus, gpu_ram_mb=machine.gpu_ram_mb, billing=Billing.ON_DEMAND,
        compute_micros_h=machine.price_micros_h, disk_micros_gb_month=0, upload_micros_gb=0, download_micros_gb=0,
        up_mbps=machine.up_mbps, down_mbps=machine.down_mbps, reliability=machine.reliability, region="",
        max_duration_s=None, dlperf=0.0, ports=1 if machine.relay_port else 0, fetched_at=now,
    )  # fmt: skip


def taken(machine: Machine, instance_id: str, spec: RentSpec) -> Taken:
    """What is kept of a machine that is asked to run `spec`."""
    ports = spec.ports[:1] if machine.relay_port else ()
    return Taken(
        instance_id, spec.label, machine.name, machine.address, machine.user, machine.port, machine.identity_file,
        machine.gpu_name, ports,
    )  # fmt: skip


def instance(seen: Seen, machine: Machine, known: Machine, entry: Taken | None, provider: str) -> Instance:
    """What a machine says that it runs. `known`: the machine as it is listed now; `entry`: what was kept of it."""
    ports = {port: known.relay_port for port in (entry.ports if entry else ()) if known.relay_port}
    return Instance(
        provider=provider, instance_id=seen.instance_id, label=seen.label,
        phase=Phase.RUNNING if seen.running else Phase.FAILED, raw_status="running" if seen.running else "exited",
        detail="" if seen.running else "its script has ended: see the log", billing=Billing.ON_DEMAND,
        compute_micros_h=known.price_micros_h, machine_id=machine.name, gpu_name=known.gpu_name,
        started_at=datetime.fromtimestamp(seen.started_at, UTC) if seen.started_at is not None else None,
        public_host=machine.address if ports else None, ports=ports,
    )  # fmt: skip


def unreached(entry: Taken, error: ProviderError, provider: str) -> Instance:
    """One of ours whose machine can't be asked: it may run, and it may not."""
    return Instance(
        provider=provider, instance_id=entry.instance_id, label=entry.label, phase=Phase.UNKNOWN,
        raw_status="unreachable", detail=str(error), billing=Billing.ON_DEMAND, compute_micros_h=None,
        machine_id=entry.machine, gpu_name=entry.gpu_name, started_at=None,
    )  # fmt: skip
