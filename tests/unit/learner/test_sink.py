"""What the learner announces and what it puts into the object store: keyframes, deltas, and why there is none."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

from app.learner.sink import RelaySink
from app.protocol.errors import Unavailable
from app.protocol.job import SnapshotSpec
from app.protocol.learner import AssetInfo
from app.snapshots.codec import decode
from app.snapshots.manifest import verify
from app.snapshots.store import SnapshotStore
from tests.integration.snapshots.helpers import MemoryObjects

torch.set_num_threads(1)


class Flaky(MemoryObjects):
    down = False

    def put(self, key: str, data: bytes) -> None:
        if self.down:
            raise Unavailable("the store is away")
        super().put(key, data)


def sink(root: Path, objects: MemoryObjects, assets: Sequence[AssetInfo] = (), **spec: object) -> RelaySink:
    return RelaySink(
        root, job_id="j", relay_token="t", host="127.0.0.1", uplink_bytes_per_s=None, objects=objects, assets=assets,
        snapshots=SnapshotSpec.model_validate(spec),
    )  # fmt: skip


ADAPTER = AssetInfo(path="adapter.json", size=2, blake3="0" * 64)


def test_versions_of_a_job_with_an_adapter_are_of_that_kind_whole_and_as_deltas(tmp_path: Path) -> None:
    objects = MemoryObjects()
    learner, seen = sink(tmp_path / "learner", objects, assets=[ADAPTER]), []
    for version in range(2):
        learner.publish(version, weights(version))
        learner.upload(version)
    again = sink(tmp_path / "learner", objects, assets=[ADAPTER])
    assert again.newest == 1, "it opens them again"
    node = SnapshotStore(tmp_path / "node", job_id="j", public_key=learner.public_key)
    for name in ("0/manifest.json", "1/manifest.json", "1/delta/version.json"):
        document = objects.objects.get(f"jobs/j/snapshots/{name}")
        if document is not None:
            seen.append((name, verify(document, public_key=learner.public_key, job_id="j").kind))
    assert seen == [("0/manifest.json", "adapter"), ("1/delta/version.json", "adapter")]
    incoming = node.begin(objects.objects["jobs/j/snapshots/0/manifest.json"])
    incoming.write_leaf(0, objects.objects["jobs/j/snapshots/0/chunks/0"])
    assert incoming.complete().manifest.kind == "adapter"
    delta = objects.objects["jobs/j/snapshots/1/delta/manifest.json"]
    arriving = node.begin_delta(delta, objects.objects["jobs/j/snapshots/1/delta/version.json"])
    arriving.write_leaf(0, objects.objects["jobs/j/snapshots/1/delta/chunks/0"])
    made = arriving.complete()
    assert made.manifest.kind == "adapter"
    assert torch.equal(decode(made.payload_path)["w"].float(), weights(1)["w"])


def weights(version: int) -> dict[str, torch.Tensor]:
    state = torch.ones(20_000)
    state[: version * 11] += 1
    return {"w": state}


def test_every_so_many_versions_one_goes_into_the_store_whole(tmp_path: Path) -> None:
    objects = MemoryObjects()
    learner = sink(tmp_path, objects, keyframe_every=4)
    sent = []
    for version in range(10):
        assert learner.uploaded == len(objects.objects)
        made = learner.publish(version, weights(version))
        assert (made.delta is None) == (version == 0)
        assert made.delta is None or made.delta.base == version - 1
        sent.append(learner.upload(version))
    assert sent == ["full", "delta", "delta", "delta"] * 2 + ["full", "delta"]
    assert "jobs/j/snapshots/4/manifest.json" in objects.objects
    assert "jobs/j/snapshots/5/manifest.json" not in objects.objects
    assert "jobs/j/snapshots/5/delta/manifest.json" in objects.objects


def test_a_delta_whose_base_did_not_get_into_the_store_is_not_put_there(tmp_path: Path) -> None:
    objects = Flaky()
    learner = sink(tmp_path, objects)
    for version, down, due in [(0, False, "full"), (1, True, None), (2, False, "full"), (3, False, "delta")]:
        learner.publish(version, weights(version))
        objects.down = down
        if due is None:
            with pytest.raises(Unavailable):
                learner.upload(version)
        else:
            assert learner.upload(version) == due


def test_a_restarted_learner_begins_with_a_whole_version_in_the_store(tmp_path: Path) -> None:
    objects = MemoryObjects()
    first = sink(tmp_path, objects)
    for version in range(3):
        first.publish(version, weights(version))
        first.upload(version)
    again = sink(tmp_path, objects)
    served = again.publish(2, weights(2))
    assert served.delta is not None, "nodes that have v1 still take it as a delta"
    assert again.upload(2) == "full"
    assert again.publish(3, weights(3)).delta is not None
    assert again.upload(3) == "delta"


def test_without_deltas_all_is_whole_and_it_says_so(tmp_path: Path) -> None:
    objects = MemoryObjects()
    learner = sink(tmp_path, objects, deltas=False)
    for version in range(3):
        made = learner.publish(version, weights(version))
        assert (made.delta, made.note) == (None, "deltas are off")
        assert learner.upload(version) == "full"


def test_what_is_published_is_quantised_if_the_job_says_so_deltas_too(tmp_path: Path) -> None:
    state = {"w": torch.randn(100, 100, generator=torch.Generator().manual_seed(0))}
    plain = sink(tmp_path / "a", MemoryObjects()).publish(0, state)
    learner = sink(tmp_path / "b", MemoryObjects(), quantise="int8")
    small = learner.publish(0, state)
    assert small.bytes < 0.6 * plain.bytes
    state["w"][3] *= 1.5
    made = learner.publish(1, state)
    assert made.delta is not None, made.note
    assert made.delta.bytes < 0.1 * small.bytes
