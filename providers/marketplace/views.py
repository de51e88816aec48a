"""Offers, instances and charges as vast.ai writes them.

Invariant: pure; numbers are dollars as JSON numbers with at most six decimals of a micro-dollar, so that reading
them back gives the exact amount.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from .billing import GB, Account, Line
from .clock import NS
from .config import MICROS, MachineSpec
from .contract import Contract, State

HOURS_PER_MONTH = 720


@dataclass(slots=True)
class Machine:
    """A machine with its present prices. `ask_id` is None while it is let."""

    spec: MachineSpec
    dph_base: int
    min_bid: int
    ask_id: int | None
    offline: bool = False
    tenant: int | None = None
    """Contract that holds it; kept until its last process is gone."""


def dollars(micros: int) -> float:
    """Micro-dollars as a JSON number."""
    return micros / MICROS


def storage_dph(storage_cost: int, gigabytes: float) -> float:
    """Dollars per hour of `gigabytes` of disk."""
    return dollars(storage_cost) * gigabytes / HOURS_PER_MONTH


def _hardware(spec: MachineSpec) -> dict[str, Any]:
    return {
        "machine_id": spec.machine_id, "host_id": spec.host_id or spec.machine_id // 10, "num_gpus": spec.num_gpus,
        "gpu_name": spec.gpu_name, "gpu_ram": spec.gpu_ram_mb, "gpu_total_ram": spec.gpu_ram_mb * spec.num_gpus,
        "gpu_frac": 1.0, "compute_cap": spec.compute_cap, "cuda_max_good": spec.cuda_max_good,
        "driver_version": "570.86.10", "cpu_cores": spec.cpu_cores, "cpu_cores_effective": float(spec.cpu_cores),
        "cpu_ram": spec.cpu_ram, "cpu_ghz": 3.2, "pcie_bw": 24.0, "disk_space": spec.disk_space, "disk_bw": 3500.0,
        "inet_up": spec.inet_up, "inet_down": spec.inet_down, "inet_up_cost": dollars(spec.inet_up_cost),
        "inet_down_cost": dollars(spec.inet_down_cost), "internet_up_cost_per_tb": dollars(spec.inet_up_cost * 1000),
        "internet_down_cost_per_tb": dollars(spec.inet_down_cost * 1000), "storage_cost": dollars(spec.storage_cost),
        "dlperf": spec.dlperf, "reliability": spec.reliability, "reliability2": spec.reliability,
        "verification": spec.verification, "hosting_type": spec.hosting_type, "external": None,
        "geolocation": spec.geolocation, "direct_port_count": spec.direct_port_count, "static_ip": True,
        "public_ipaddr": "127.0.0.1", "cluster_id": None,
    }  # fmt: skip


def offer_row(machine: Machine, kind: str, storage_gb: float, now_ns: int) -> dict[str, Any]:
    """One machine as a search answer shows it; `kind` is ondemand, bid or reserved."""
    spec = machine.spec
    bid = kind == "bid"
    base = dollars(machine.min_bid if bid else machine.dph_base)
    storage = storage_dph(spec.storage_cost, storage_gb)
    total = base + storage
    duration = spec.duration_days * 86400
    return {
        **_hardware(spec),
        "id": machine.ask_id, "ask_contract_id": machine.ask_id, "dph_base": base, "storage_total_cost": storage,
        "dph_total": total, "discounted_dph_total": total, "min_bid": dollars(machine.min_bid), "is_bid": bid,
        "dlperf_per_dphtotal": spec.dlperf / total if total else 0.0,
        "score": spec.dlperf * spec.reliability / total if total else 0.0, "rentable": True, "rented": False,
        "duration": duration, "end_date": now_ns / NS + duration,
    }  # fmt: skip


def _triple(contract: Contract) -> tuple[str, str, str]:
    """cur_state, next_state, intended_status."""
    if contract.state is State.STOPPED:
        return "stopped", "stopped", "stopped"
    if contract.state in (State.EXITED, State.OFFLINE):
        return "stopped", "stopped", "running"
    if contract.state is State.RUNNING:
        return "running", "running", "running"
    return "stopped", "running", "running"


def _port_map(contract: Contract) -> dict[str, list[dict[str, str]]] | None:
    if contract.state is not State.RUNNING:
        return None
    return {
        f"{inner}/tcp": [{"HostIp": "0.0.0.0", "HostPort": str(outer)}]
        for inner, outer in contract.public_ports.items()
    }


def instance_row(contract: Contract, machine: Machine, now_ns: int) -> dict[str, Any]:
    """One contract as list and show answer it."""
    order, spec = contract.order, machine.spec
    base = dollars(contract.account.tariff.gpu_h)
    storage = storage_dph(contract.account.tariff.disk_gb_month, order.disk_bytes / GB)
    current, following, intended = _triple(contract)
    started = (contract.first_run_ns or contract.created_ns) / NS
    running = contract.state is State.RUNNING
    return {
        **_hardware(spec),
        "id": contract.id, "label": contract.label, "actual_status": contract.state.value, "cur_state": current,
        "next_state": following, "intended_status": intended, "status_msg": contract.detail, "is_bid": contract.is_bid,
        "dph_base": base, "dph_total": base + storage, "storage_total_cost": storage,
        "min_bid": dollars(machine.min_bid), "disk_space": order.disk_bytes / GB, "disk_usage": -1.0,
        "start_date": started, "end_date": contract.created_ns / NS + spec.duration_days * 86400,
        "duration": max(0.0, now_ns / NS - started), "image_uuid": order.image, "onstart": order.onstart,
        "extra_env": [[key, value] for key, value in order.env.items()], "ports": _port_map(contract),
        "ssh_host": "127.0.0.1", "ssh_port": 22, "ssh_idx": "1", "gpu_util": 90.0 if running else None,
        "uptime_mins": (now_ns - contract.running_ns) / NS / 60 if running else None, "image_runtype": "ssh_direct",
    }  # fmt: skip


def charge_row(contract: Contract, lines: Iterable[Line]) -> dict[str, Any]:
    """One contract's bill for the lines given, one item a kind and a day."""
    source = f"instance-{contract.id}"
    items: list[dict[str, Any]] = [
        {
            "type": line.kind.value, "source": source, "description": f"{line.kind.value} on day {line.day}",
            "amount": dollars(line.micros), "start": line.start_ns / NS, "end": line.end_ns / NS, "items": [],
            "metadata": {},
        }
        for line in sorted(lines, key=lambda x: (x.day, x.kind))
    ]  # fmt: skip
    amount = sum(line.micros for line in lines)
    return {
        "type": "instance", "source": source, "description": f"Instance {contract.id} charges",
        "amount": dollars(amount), "start": min((i["start"] for i in items), default=contract.created_ns / NS),
        "end": max((i["end"] for i in items), default=contract.created_ns / NS), "items": items,
        "metadata": {"label": contract.label, "instance_id": contract.id, "machine_id": contract.machine_id},
    }  # fmt: skip


def lines_between(account: Account, first_day: int, last_day: int) -> list[Line]:
    """Lines of the days first..last, both included."""
    return [line for line in account.lines.values() if first_day <= line.day <= last_day]
