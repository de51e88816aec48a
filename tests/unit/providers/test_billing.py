"""The marketplace's money: exact, and billed by state as vast.ai does."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from providers.marketplace import auction
from providers.marketplace.billing import DAY_NS, GB, HOUR_NS, MONTH_NS, Account, Kind, Tariff
from providers.marketplace.clock import NS
from providers.marketplace.config import MarketConfig, load_machines
from providers.marketplace.contract import Contract, Order, State
from providers.marketplace.gateway import Link
from providers.marketplace.market import Market
from providers.marketplace.refusals import Refused
from providers.marketplace.store import Store

TARIFF = Tariff(gpu_h=350_000, disk_gb_month=150_000, down_gb=2_000, up_gb=3_000, disk_bytes=20 * GB)
START = 20_000 * DAY_NS + 5 * HOUR_NS


class FakeClock:
    def __init__(self) -> None:
        self.ns = START

    def now_ns(self) -> int:
        return self.ns

    def pass_s(self, seconds: float) -> None:
        self.ns += int(seconds * NS)


@given(st.lists(st.tuples(st.integers(0, 40 * HOUR_NS), st.booleans(), st.integers(0, 10**10)), max_size=30))
def test_the_bill_is_the_floor_of_the_exact_amount_however_time_is_cut(steps: list[tuple[int, bool, int]]) -> None:
    account, now = Account(TARIFF, START), START
    gpu = disk = down = Fraction(0)
    for span, running, count in steps:
        now += span
        account.settle(now, gpu=running, disk=True)
        account.traffic(now, down=count, up=0)
        gpu += Fraction(TARIFF.gpu_h * span, HOUR_NS) if running else 0
        disk += Fraction(TARIFF.disk_bytes * TARIFF.disk_gb_month * span, GB * MONTH_NS)
        down += Fraction(TARIFF.down_gb * count, GB)
    assert account.micros(Kind.GPU) == gpu // 1
    assert account.micros(Kind.DISK) == disk // 1
    assert account.micros(Kind.DOWN) == down // 1
    assert sum(line.micros for line in account.lines.values()) == account.total_micros()
    assert all(line.start_ns // DAY_NS == line.day for line in account.lines.values())
    assert Account.load(account.dump()) == account


def test_an_hour_of_the_documented_example() -> None:
    """10 GB at 0.149333 $/GB/month is 0.0020741 $/h (vast.ai's own example); the month has 720 hours."""
    account = Account(Tariff(1_000_000, 149_333, 0, 0, 10 * GB), START)
    account.settle(START + HOUR_NS, gpu=True, disk=True)
    assert (account.micros(Kind.GPU), account.micros(Kind.DISK)) == (1_000_000, 2_074)


def test_a_night_is_billed_to_the_days_on_both_sides_of_midnight() -> None:
    account, midnight = Account(TARIFF, START), (START // DAY_NS + 1) * DAY_NS
    account.settle(midnight + HOUR_NS, gpu=True, disk=False)
    found = sorted((line.day, line.start_ns, line.end_ns, line.micros) for line in account.lines.values())
    day = START // DAY_NS
    assert found == [(day, START, midnight, 19 * 350_000), (day + 1, midnight, midnight + HOUR_NS, 350_000)]


def test_a_clock_that_goes_back_costs_nothing() -> None:
    account = Account(TARIFF, START)
    account.settle(START - HOUR_NS, gpu=True, disk=True)
    account.settle(START, gpu=True, disk=True)
    assert account.total_micros() == 0


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def market(tmp_path: Path, clock: FakeClock) -> Iterator[Market]:
    config = MarketConfig(tmp_path, "key")
    made = Market(config, load_machines(config.machines_file), clock, Store(tmp_path), lambda *_: 0)
    yield made
    made.close()


def rent(market: Market, gpu: str, bid: int | None = None, disk_gb: int = 72) -> Contract:
    machine = next(m for m in market.offers() if m.spec.gpu_name == gpu)
    assert machine.ask_id is not None
    return market.create(machine.ask_id, Order("img", "", {}, (), disk_gb * GB, "L", bid))


def bill(contract: Contract) -> dict[str, int]:
    return {kind.value: contract.account.micros(kind) for kind in Kind}


def test_gpu_is_billed_only_while_running_and_disk_until_destroyed(market: Market, clock: FakeClock) -> None:
    contract = rent(market, "L40S")  # $0.62/h, disk $0.20/GB/month: 72 GB cost $0.02/h
    clock.pass_s(1800)
    market.settle_all()
    assert bill(contract) == {"gpu": 0, "disk": 10_000, "bwd": 0, "bwu": 0}  # loading
    market.running(contract, 1, 0.0)
    clock.pass_s(3600)
    market.stop(contract)
    assert bill(contract) == {"gpu": 620_000, "disk": 30_000, "bwd": 0, "bwu": 0}
    clock.pass_s(7200)
    market.settle_all()
    assert bill(contract) == {"gpu": 620_000, "disk": 70_000, "bwd": 0, "bwu": 0}  # stopped
    market.destroy(contract)
    clock.pass_s(7200)
    market.settle_all()
    assert bill(contract)["disk"] == 70_000
    assert market.credit_micros() == 1_000_000_000 - 690_000


def test_a_dead_host_bills_nothing(market: Market, clock: FakeClock) -> None:
    contract = rent(market, "L40S")
    market.running(contract, 1, 0.0)
    market.set_offline(market.machine_of(contract), offline=True)
    clock.pass_s(3600)
    market.settle_all()
    assert contract.state is State.OFFLINE
    assert sum(bill(contract).values()) == 0


def test_an_outbid_instance_does_not_resume_on_a_dead_host(market: Market) -> None:
    contract = rent(market, "A100 SXM4", bid=500_000)
    machine = market.machine_of(contract)
    auction.reprice(market, [machine], lambda m: (m.dph_base, 600_000))
    auction.decide(market)
    market.set_offline(machine, offline=True)
    auction.reprice(market, [machine], lambda m: (m.dph_base, 400_000))
    auction.decide(market)
    market.stop(contract)
    assert contract.state is State.OFFLINE


def test_traffic_is_billed_both_ways_and_after_destruction_until_the_process_is_gone(market: Market) -> None:
    contract = rent(market, "H100 SXM")  # $0.004/GB each way
    link = market.links[contract.id] = Link(1000, 1000)
    link._bytes.update(up=2 * GB, down=GB)
    market.settle_all()
    assert (bill(contract)["bwu"], bill(contract)["bwd"]) == (8_000, 4_000)
    market.destroy(contract)
    link._bytes.update(up=GB)
    market.vacate(contract)
    assert (bill(contract)["bwu"], bill(contract)["bwd"]) == (12_000, 4_000)


def test_on_demand_keeps_its_price_and_a_bid_pays_itself(market: Market, clock: FakeClock) -> None:
    fixed = rent(market, "L40S")
    spot = rent(market, "A100 SXM4", bid=500_000)
    for contract in (fixed, spot):
        market.running(contract, 1, 0.0)
    auction.reprice(market, market.machines.values(), lambda m: (m.dph_base * 2, m.min_bid))
    clock.pass_s(3600)
    market.set_bid(spot, 700_000)
    clock.pass_s(3600)
    market.settle_all()
    assert bill(fixed)["gpu"] == 2 * 620_000
    assert bill(spot)["gpu"] == 500_000 + 700_000


def test_outbid_stops_the_gpu_and_resumes_by_itself(market: Market, clock: FakeClock) -> None:
    contract = rent(market, "A100 SXM4", bid=500_000)
    market.running(contract, 1, 0.0)
    machine = market.machine_of(contract)
    auction.reprice(market, [machine], lambda m: (m.dph_base, 500_001))
    auction.decide(market)
    assert (contract.state, contract.outbid) == (State.STOPPED, True)
    clock.pass_s(3600)
    market.settle_all()
    assert bill(contract)["gpu"] == 0
    assert bill(contract)["disk"] == 20_000
    auction.reprice(market, [machine], lambda m: (m.dph_base, 500_000))
    auction.decide(market)
    assert contract.state is State.LOADING


def test_without_credit_machines_stop_and_nothing_more_is_rented(market: Market, clock: FakeClock) -> None:
    contract = rent(market, "H100 SXM")
    market.running(contract, 1, 0.0)
    clock.pass_s(3600 * 600)
    auction.decide(market)
    assert contract.state is State.STOPPED
    with pytest.raises(Refused, match="credit"):
        rent(market, "L40S")


def test_a_bid_below_the_floor_leaves_a_stopped_instance_behind(market: Market) -> None:
    with pytest.raises(Refused) as caught:
        rent(market, "A100 SXM4", bid=100_000)
    made = market.contracts[caught.value.body["new_contract"]]
    assert made.state is State.STOPPED


def test_an_offer_is_rented_once_and_comes_back_under_another_id(market: Market) -> None:
    machine = next(m for m in market.offers() if m.spec.gpu_name == "L40S")
    ask = machine.ask_id
    assert ask is not None
    contract = rent(market, "L40S")
    with pytest.raises(Refused) as caught:
        market.create(ask, contract.order)
    assert (caught.value.status, caught.value.body["error"]) == (410, "no_such_ask")
    with pytest.raises(Refused) as caught:
        market.create(1, contract.order)
    assert (caught.value.status, caught.value.body["error"]) == (404, "invalid_args")
    market.destroy(contract)
    assert machine not in market.offers()  # its process is not known to be gone
    market.vacate(contract)
    assert machine in market.offers()
    assert machine.ask_id != ask


def test_a_restart_keeps_the_bill_and_closes_it_at_the_last_known_time(tmp_path: Path, clock: FakeClock) -> None:
    config = MarketConfig(tmp_path, "key")
    specs = load_machines(config.machines_file)
    store = Store(tmp_path)
    old = Market(config, specs, clock, store, lambda *_: 0)
    contract = rent(old, "L40S")
    old.running(contract, 4242, 17.0)
    clock.pass_s(3600)
    old.settle_all()
    old.save()
    store.close()  # the power goes
    clock.pass_s(3600)
    killed: list[tuple[int, float, str]] = []

    def leftover(pid: int, started: float, mark: str) -> int:
        killed.append((pid, started, mark))
        return 1

    new = Market(config, specs, clock, Store(tmp_path), leftover)
    assert killed == [(4242, 17.0, contract.api_key)]
    assert new.billed_micros() == 620_000 + 20_000
    assert new.live() == []
    assert rent(new, "L40S").id > contract.id
    new.close()
