"""What is in force in an engine is what the learner signed, bit for bit, or nothing is."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest
import torch
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from app.protocol.errors import Unavailable
from app.protocol.job import SamplingSpec
from app.rollout_agent.agent import Agent
from app.rollout_agent.config import AgentSettings, RelayAddress
from app.rollout_agent.engines.base import GenRequest, Tainted
from app.rollout_agent.engines.check import check_loaded
from app.rollout_agent.engines.transformers import TransformersEngine
from app.rollout_agent.installing import NotTaken, put_in_force
from app.snapshots import Snapshot
from app.snapshots.codec import decode
from app.snapshots.manifest import Manifest, new_key
from tests.integration.rollout_agent.fake_control import JOIN_TOKEN, eventually, running
from tests.unit.rollout_agent.tiny import make_model, new_store, publish, write_model_files

torch.set_num_threads(1)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_files(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def key() -> Ed25519PrivateKey:
    return new_key()


@pytest.fixture
def snapshot(folder: Path, key: Ed25519PrivateKey, tmp_path: Path) -> Snapshot:
    return publish(new_store(tmp_path, key), key, make_model(folder, seed=0).state_dict(), 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
def test_weights_as_they_were_signed_pass_in_every_type(dtype: torch.dtype, snapshot: Snapshot) -> None:
    weights = {name: tensor.to(dtype) for name, tensor in decode(snapshot.payload_path).items()}
    check_loaded(snapshot.payload_path, snapshot.manifest, weights)


def one_bit(tensor: torch.Tensor) -> None:
    tensor.view(-1).view(torch.int16)[0] ^= 1


def all_zero(tensor: torch.Tensor) -> None:
    tensor.zero_()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("harm", [one_bit, all_zero])
def test_one_wrong_tensor_is_found(
    harm: Callable[[torch.Tensor], None], dtype: torch.dtype, snapshot: Snapshot
) -> None:
    weights = {name: tensor.to(dtype, copy=True) for name, tensor in decode(snapshot.payload_path).items()}
    harm(weights[snapshot.manifest.tensors[-1].name])
    with pytest.raises(Tainted, match="v3"):
        check_loaded(snapshot.payload_path, snapshot.manifest, weights)


class Forgetful(TransformersEngine):
    """Leaves one tensor as it was, as engines did that replaced a parameter's storage; `times` so often."""

    def __init__(self, times: int) -> None:
        super().__init__(threads=1)
        self.times = times
        self.loads = 0

    def load(self, model_dir: Path) -> None:
        super().load(model_dir)
        self.loads += 1
        if self.loads <= self.times:
            name = next(iter(self._weights))
            self._weights[name] = self._weights[name].clone().expand_as(self._weights[name])
            stale = self._weights[name]

            class Stale(dict[str, torch.Tensor]):
                def __getitem__(self, key: str) -> torch.Tensor:
                    return torch.zeros_like(stale) if key == name else super().__getitem__(key)

            self._weights = Stale(self._weights)


@pytest.mark.parametrize("times", [0, 1, 2])
def test_an_engine_that_holds_something_else_is_loaded_again_once(times: int, folder: Path, snapshot: Snapshot) -> None:
    engine = Forgetful(times)
    engine.load(folder)
    if times == 2:
        with pytest.raises(Tainted):
            put_in_force(engine, folder, snapshot)
        assert engine.version is None
        with pytest.raises(Unavailable):
            engine.generate([GenRequest([5], 1, 0, SamplingSpec(max_tokens=2))])
    else:
        mended = put_in_force(engine, folder, snapshot)
        assert (mended is not None) == (times == 1)
        assert engine.version == 3
    assert engine.loads == 1 + min(times, 1)


def test_a_version_that_fails_twice_gives_way_to_the_one_before(
    folder: Path, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    store = new_store(tmp_path, key)
    before, snapshot = (publish(store, key, make_model(folder, seed=v).state_dict(), v) for v in (3, 4))
    engine = Forgetful(2)
    engine.load(folder)
    with pytest.raises(NotTaken, match="version 3 is in force again"):
        put_in_force(engine, folder, snapshot, before)
    assert (engine.version, engine.loads) == (3, 3)
    check_loaded(before.payload_path, before.manifest, engine._weights)
    assert engine.generate([GenRequest([5], 1, 0, SamplingSpec(max_tokens=2))])


def test_when_the_version_before_fails_as_well_nothing_is_in_force(
    folder: Path, key: Ed25519PrivateKey, tmp_path: Path
) -> None:
    store = new_store(tmp_path, key)
    before, snapshot = (publish(store, key, make_model(folder, seed=v).state_dict(), v) for v in (3, 4))
    engine = Forgetful(3)
    engine.load(folder)
    with pytest.raises(Tainted, match=r"v4.*nor could version 3 be put in force again.*v3"):
        put_in_force(engine, folder, snapshot, before)
    assert (engine.version, engine.loads) == (None, 3)


class Unlucky(TransformersEngine):
    """Can't take version 1."""

    def __init__(self) -> None:
        super().__init__(threads=1)
        self.tries = 0

    def install(self, payload: Path, manifest: Manifest, version: int) -> None:
        if version == 1:
            self.tries += 1
            self._version = None
            raise Tainted("v1 did not go into the engine")
        super().install(payload, manifest, version)


async def test_a_node_works_on_under_the_last_good_version_until_a_newer_one_comes(tmp_path: Path) -> None:
    engine = Unlucky()
    async with running(tmp_path) as (control, _), httpx.AsyncClient() as http:
        given = {"control_url": control.base_url, "join_token": JOIN_TOKEN, "agent_dir": tmp_path / "node"}
        settings = AgentSettings.model_validate({**given, "device": "cpu"})
        agent = Agent(settings, engine, http, relay=RelayAddress("127.0.0.1", 1, None))
        life = asyncio.create_task(agent.run())
        await eventually(lambda: len(control.committed) > 0, "it works")
        await control.publish(1)
        await eventually(lambda: len(control.faults) > 0, "it is reported")
        before = len(control.committed)
        await eventually(lambda: len(control.committed) > before + 4 or life.done(), "it works on")
        assert not life.done()
        assert set(control.committed.values()) == {0}
        await control.publish(2)
        await eventually(lambda: 2 in control.committed.values(), "the next version is installed")
        agent.stop()
        assert (await asyncio.wait_for(life, 20)).code == 0
    (report,) = control.faults
    assert (report.kind, report.subject, report.version) == ("engine_error", "install", 1)
    assert report.detail == "v1 did not go into the engine; version 0 is in force again"
    assert engine.tries == 2
