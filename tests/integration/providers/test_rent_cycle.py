"""From offer to bill, through HTTP, with real processes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path

import httpx
import psutil
import pytest

from providers.base import AuthError, Billing, OfferGone, OfferQuery, Phase, RentSpec
from providers.marketplace import ConfigError, MarketConfig, MarketServer
from providers.vastai import VastAI

from .rig import KEY, Rig, until


async def test_rent_run_destroy_bill(rig: Rig) -> None:
    offer = await rig.offer()
    made = await rig.rent('echo "$CONTAINER_ID $ECHO2_GPU_NAME $GREETING"; sleep 600', env={"GREETING": "hello"})
    assert made.outcome == "created"
    instance = await rig.phase(made.instance_id, Phase.RUNNING)
    assert (instance.label, instance.billing) == ("echo2:f:l:1", Billing.ON_DEMAND)
    assert instance.compute_micros_h == offer.compute_micros_h
    assert await rig.log(made.instance_id, "hello") == f"{made.instance_id} RTX 4090 hello\n"
    assert offer.machine_id not in {o.machine_id for o in await rig.provider.search(OfferQuery(Billing.ON_DEMAND))}
    process = await rig.process_of(made.instance_id)
    children = process.children(recursive=True)

    assert made.instance_id is not None
    await rig.provider.release(made.instance_id)
    assert await rig.provider.get(made.instance_id) is None
    assert (await rig.provider.list()).instances == ()
    state = await rig.quiet()
    assert not any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in [process, *children])
    assert offer.machine_id in {o.machine_id for o in await rig.provider.search(OfferQuery(Billing.ON_DEMAND))}

    charges = await rig.provider.charges(datetime.now(UTC) - timedelta(hours=1))
    assert sum(c.micros for c in charges) == state["billed_micros"]
    gpu = next(c for c in charges if c.kind == "gpu")
    seconds = (gpu.end - gpu.start).total_seconds()
    assert gpu.micros == pytest.approx(offer.compute_micros_h * seconds / 3600, abs=1)
    assert gpu.micros > 0
    assert {c.label for c in charges} == {"echo2:f:l:1"}


async def test_destroying_twice_is_fine_and_a_stranger_is_not(rig: Rig) -> None:
    made = await rig.rent("sleep 600")
    assert made.instance_id is not None
    stranger = VastAI("marketplace", rig.server.url, "wrong", interval_scale=0)
    with pytest.raises(AuthError):
        await stranger.release(made.instance_id)
    with pytest.raises(AuthError):
        await stranger.balance()
    assert len(await stranger.search(OfferQuery(Billing.ON_DEMAND))) > 0
    await stranger.aclose()
    assert await rig.provider.get(made.instance_id) is not None
    await rig.provider.release(made.instance_id)
    await rig.provider.release(made.instance_id)


async def test_a_process_that_hides_from_its_group_and_ignores_sigterm_dies_too(rig: Rig) -> None:
    made = await rig.rent(
        "trap '' TERM; (setsid bash -c 'trap \"\" TERM; echo hidden $$; while :; do sleep 1; done' &); "
        "while :; do sleep 1; done"
    )
    hidden = psutil.Process(int((await rig.log(made.instance_id, "hidden")).split()[1]))
    assert made.instance_id is not None
    await rig.provider.release(made.instance_id)
    await rig.quiet()
    assert not hidden.is_running() or hidden.status() == psutil.STATUS_ZOMBIE


async def test_a_process_that_ends_is_an_exited_instance_and_costs_only_its_disk(rig: Rig) -> None:
    made = await rig.rent("echo bye; exit 3")
    instance = await rig.phase(made.instance_id, Phase.FAILED)
    assert instance.raw_status == "exited"
    assert "status 3" in instance.detail
    await rig.gpu_bill_stands_still()


async def test_the_environment_holds_nothing_of_ours(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_ADMIN_KEY", "s3cret")
    made = await rig.rent("env; echo DONE; sleep 600")
    out = await rig.log(made.instance_id, "DONE")
    names = dict(line.split("=", 1) for line in out.splitlines() if "=" in line)
    assert "ECHO2_ADMIN_KEY" not in names
    assert names["PATH"].split(":")[0] == os.path.dirname(sys.executable)
    assert names["HOME"] == names["PWD"]
    assert names["OMP_NUM_THREADS"] == "1"
    assert names["ALL_PROXY"].startswith("socks5://127.0.0.1:")
    assert float(names["ECHO2_SIM_TOKENS_PER_S"]) > 0
    assert KEY not in out


async def test_the_instance_key_may_end_its_own_instance_and_nothing_else(rig: Rig) -> None:
    onstart = (
        'python - <<"E"\nimport os, httpx\n'
        'c = httpx.Client(base_url=os.environ["VAST_URL"], trust_env=False,\n'
        '    headers={"Authorization": "Bearer " + os.environ["CONTAINER_API_KEY"]})\n'
        'own = int(os.environ["CONTAINER_ID"])\n'
        'print("OTHER", c.delete(f"/api/v0/instances/{own - 1}/").status_code)\n'
        'print("LIST", c.get("/api/v1/instances/").status_code)\n'
        'print("LABEL", c.put(f"/api/v0/instances/{own}/", json={"label": "mine"}).status_code)\n'
        'print("RENT", c.put("/api/v0/asks/7000001/", json={}).status_code, flush=True)\n'
        'c.delete(f"/api/v0/instances/{own}/")\nE\nsleep 600\n'
    )
    other = await rig.rent("sleep 600", label="other")
    made = await rig.rent(onstart)
    path = rig.server.app.state.machines.log_path(int(made.instance_id or 0))  # type: ignore[union-attr]

    async def gone() -> bool:
        assert made.instance_id is not None
        return await rig.provider.get(made.instance_id) is None

    await until(gone, bool, "the instance's own end")
    assert path.read_text().split() == ["OTHER", "401", "LIST", "401", "LABEL", "401", "RENT", "401"]
    assert [i.instance_id for i in (await rig.provider.list()).instances] == [other.instance_id]


async def test_thirty_instances_take_two_pages_and_lag_hides_the_newest(tmp_path: Path) -> None:
    text = (Path(__file__).parents[3] / "providers/marketplace/machines.toml").read_text().split("[[machine]]")[1]
    lines = [line for line in text.splitlines() if not line.startswith("machine_id")]
    machines = tmp_path / "many.toml"
    machines.write_text("\n".join("\n".join(["[[machine]]", f"machine_id = {i}", *lines]) for i in range(1, 31)))
    config = MarketConfig(tmp_path / "m", KEY, start_delay_s=600, machines_file=machines, list_lag_s=0.5)
    async with MarketServer(config) as server:
        provider = VastAI("marketplace", server.url, KEY, interval_scale=0)
        offers = await provider.search(OfferQuery(Billing.ON_DEMAND))
        spec = RentSpec("L", "img", "", {}, 10.0)
        ids = [(await provider.rent(offer, spec)).instance_id for offer in offers]
        assert (await provider.get(ids[-1] or "")) is not None
        listing = await until(provider.list, lambda x: len(x.instances) == 30, "the list's end of lag")
        assert listing.complete
        assert sorted(i.instance_id for i in listing.instances) == sorted(str(i) for i in ids)
        await provider.aclose()


async def test_two_who_want_one_offer(rig: Rig) -> None:
    offer = await rig.offer()
    second = VastAI("marketplace", rig.server.url, KEY, interval_scale=0)
    spec = RentSpec("L", "img", "sleep 600", {}, 10.0)
    results = await asyncio.gather(rig.provider.rent(offer, spec), second.rent(offer, spec))
    await second.aclose()
    assert sorted(r.outcome for r in results) == ["created", "refused"]
    assert isinstance(next(r.error for r in results if r.outcome == "refused"), OfferGone)


async def test_old_list_is_retired_slashes_are_alike_and_the_type_is_plain(rig: Rig) -> None:
    for path in ("/api/v0/instances/", "/api/v0/instances"):
        answer = await rig.http.get(path)
        assert (answer.status_code, answer.json()["error"]) == (410, "deprecated_endpoint")
    for path in ("/api/v0/users/current", "/api/v0/users/current/", "/api/v0/gpu_names/unique", "/api/v1/instances"):
        answer = await rig.http.get(path)
        assert (answer.status_code, answer.headers["content-type"]) == (200, "application/json")
    offers = (await rig.http.put("/api/v0/search/asks/", json={"q": {"gpu_name": {"eq": "L40S"}}})).json()["offers"]
    assert [o["gpu_name"] for o in offers] == ["L40S"]
    bad = await rig.http.post("/api/v0/bundles/", json={"gpu_name": {"like": "x"}})
    assert (bad.status_code, bad.json()["msg"]) == (400, "like is not a valid search op")


async def test_without_the_control_side_there_is_none(tmp_path: Path) -> None:
    async with (
        MarketServer(MarketConfig(tmp_path, KEY)) as server,
        httpx.AsyncClient(headers={"Authorization": f"Bearer {KEY}"}, trust_env=False, timeout=10) as http,
    ):
        assert (await http.get(f"{server.url}/_market/state")).status_code == 404


async def test_the_control_side_wants_the_key(rig: Rig) -> None:
    answer = await rig.http.get("/_market/state", headers={"Authorization": "Bearer wrong"})
    assert answer.json()["error"] == "auth_error"


async def test_stop_ends_every_process_and_keeps_the_bill(config: MarketConfig) -> None:
    async with MarketServer(config) as server:
        provider = VastAI("marketplace", server.url, KEY, interval_scale=0)
        rig = Rig(server, provider, httpx.AsyncClient(base_url=server.url, headers={"Authorization": f"Bearer {KEY}"}))
        made = await rig.rent("sleep 600")
        await rig.phase(made.instance_id, Phase.RUNNING)
        process = await rig.process_of(made.instance_id)
        with pytest.raises(ConfigError, match="in use"):
            await MarketServer(config).start()
        await provider.aclose()
        await rig.http.aclose()
    assert not process.is_running()
    async with MarketServer(config) as server:
        provider = VastAI("marketplace", server.url, KEY, interval_scale=0)
        charges = await provider.charges(datetime.now(UTC) - timedelta(hours=1))
        assert {c.instance_id for c in charges} == {made.instance_id}
        assert (await provider.list()).instances == ()
        await provider.aclose()


SERVE = """
import asyncio, json, sys
from pathlib import Path
from providers.marketplace import MarketConfig, serve
config = MarketConfig(Path(sys.argv[1]), sys.argv[2], start_delay_s=0.05, stop_grace_s=1.0, control_enabled=True)
asyncio.run(serve(config, ready=lambda url: print(json.dumps(url), flush=True)))
"""


async def _served(state_dir: Path) -> tuple[asyncio.subprocess.Process, str]:
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", SERVE, str(state_dir), KEY, stdout=asyncio.subprocess.PIPE, cwd=Path(__file__).parents[3]
    )
    assert process.stdout is not None
    async with asyncio.timeout(30):
        return process, json.loads(await process.stdout.readline())


async def test_kill_nine_leaves_processes_that_the_next_start_ends(tmp_path: Path) -> None:
    first, url = await _served(tmp_path)
    provider = VastAI("marketplace", url, KEY, interval_scale=0)
    http = httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {KEY}"}, trust_env=False)
    rig = Rig(MarketServer(MarketConfig(tmp_path, KEY)), provider, http)
    made = await rig.rent("(setsid sleep 600 &); sleep 600")
    await rig.phase(made.instance_id, Phase.RUNNING)
    leader = await rig.process_of(made.instance_id)
    await provider.aclose()
    await http.aclose()
    first.kill()
    await first.wait()
    assert leader.is_running()

    second, url = await _served(tmp_path)
    assert not leader.is_running() or leader.status() == psutil.STATUS_ZOMBIE
    provider = VastAI("marketplace", url, KEY, interval_scale=0)
    assert (await provider.list()).instances == ()
    charges = await provider.charges(datetime.now(UTC) - timedelta(hours=1))
    assert {c.instance_id for c in charges} == {made.instance_id}
    await provider.aclose()
    second.send_signal(signal.SIGTERM)
    async with asyncio.timeout(20):
        assert await second.wait() == 0
