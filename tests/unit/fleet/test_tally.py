"""The money of many leases, against the same sums made lease by lease."""

from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.fleet import money
from app.fleet.tally import BILLED, COUNTED, SHOWN, tally
from app.protocol.base import usd
from app.storage.models import LeaseState

NOW = 1_800_000_000.0
COLUMNS = {column.key for column in (*SHOWN, *COUNTED, *BILLED)}

seconds = st.floats(0, 1e5, allow_nan=False)
amounts = st.integers(0, 10**7)


@st.composite
def leases(draw: st.DrawFn) -> Any:
    """A row of the query, in any state, with or without anything open."""
    state = draw(st.sampled_from(list(LeaseState)))
    created = NOW - draw(seconds)
    exists = draw(st.none() | st.just(created + 1))
    ended = draw(st.none() | st.just((exists or created) + draw(seconds))) if state is not LeaseState.ACTIVE else None
    until = draw(st.sampled_from([ended or NOW, created, created + 0.5]))
    down, up = draw(amounts), draw(amounts)
    values = {
        "id": f"lease_{draw(amounts)}", "job_id": draw(st.sampled_from(["a", "b"])), "state": str(state),
        "provider": draw(st.sampled_from(["vastai", "runpod"])), "machine_id": "1", "instance_id": None,
        "gpu_name": "RTX 3090", "reason": "", "state_since": created, "quoted_micros_h": draw(amounts),
        "rate_micros_h": draw(amounts), "effective_micros_h": draw(amounts), "created_at": created,
        "exists_since": exists, "ended_at": ended, "gpu_since": draw(st.sampled_from([None, created])),
        "gpu_running": draw(st.booleans()), "gpu_until": draw(st.sampled_from([None, until])),
        "gpu_carry": draw(st.integers(0, 3_600 * 10**9 - 1)), "spent_gpu": draw(amounts),
        "disk_until": draw(st.sampled_from([None, until])), "disk_gb": draw(st.sampled_from([8.0, 16.5])),
        "disk_micros_gb_month": draw(amounts), "disk_carry": draw(st.integers(0, 720 * 3_600 * 10**12 - 1)),
        "spent_disk": draw(amounts),
        "download_micros_gb": draw(amounts), "download_bytes": down + draw(st.sampled_from([0, 0, 10**6])),
        "download_billed": down, "download_carry": draw(st.integers(0, 10**9 - 1)), "spent_download": draw(amounts),
        "image_micros": draw(st.sampled_from([0, 0, 200_000])), "model_micros": draw(st.sampled_from([0, 300_000])),
        "upload_micros_gb": draw(amounts), "upload_bytes": up + draw(st.sampled_from([0, 0, 10**6])),
        "upload_billed": up, "upload_carry": draw(st.integers(0, 10**9 - 1)), "spent_upload": draw(amounts),
        "bill_micros": (bill := draw(st.none() | amounts)),
        "bill_through": None if bill is None else NOW, "bill_final": None if bill is None else False,
    }  # fmt: skip
    assert set(values) == COLUMNS
    return SimpleNamespace(**values)


def by_hand(lease: Any) -> Counter[str]:
    """Ledger entries and every open interval of one lease."""
    total = Counter({kind: getattr(lease, f"spent_{kind}") for kind in money.KINDS})
    for item in money.open_amounts(lease, NOW):
        total[item.kind] += item.amount.micros
    return total


@given(st.lists(leases(), max_size=12))
def test_the_sums_are_those_of_the_leases_one_by_one(rows: list[Any]) -> None:
    found = tally(rows, NOW)
    sums = [by_hand(lease) for lease in rows]
    assert found.by_kind == {kind: sum(each[kind] for each in sums) for kind in money.KINDS}
    providers: Counter[str] = Counter()
    for lease, each in zip(rows, sums, strict=True):
        providers[lease.provider] += each.total()
    assert dict(found.by_provider) == dict(providers)
    shown = [(x.id, usd(each.total())) for x, each in zip(rows, sums, strict=True) if x.exists_since is not None]
    assert [(row["id"], row["spent_usd"]) for row in found.rows] == shown
    bills = [x.bill_micros for x in rows if x.bill_micros is not None]
    assert found.billed == (sum(bills) if bills else None)


@given(st.lists(leases(), max_size=12))
def test_what_is_committed_is_that_of_all_leases_of_a_job(rows: list[Any]) -> None:
    found = tally(rows, NOW)
    for job in ("a", "b"):
        mine = [x for x in rows if x.job_id == job]
        parts = found.live.get(job, ()), found.over.get(job, 0)
        few = money.exposure_of(parts[0], NOW, budget=10**9, wind_down_s=120.0, before=parts[1])
        assert few == money.exposure_of(mine, NOW, budget=10**9, wind_down_s=120.0)
