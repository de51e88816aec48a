"""What the learner announces and what it puts into the object store: keyframes, deltas, and why there is none."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.learner.sink import RelaySink
from app.protocol.errors import Unavailable
from app.protocol.job import SnapshotSpec
from tests.integration.snapshots.helpers import MemoryObjects

torch.set_num_threads(1)


class Flaky(MemoryObjects):
    down = False

    def put(self, key: str, data: bytes) -> None:
        if self.down:
            raise Unavailable("the store is away")
        super().put(key, data)


def sink(root: Path, objects: MemoryObjects, **spec: object) -> RelaySink:
    return RelaySink(
        root, job_id="j", relay_token="t", host="127.0.0.1", uplink_bytes_per_s=None, objects=objects, assets=[],
        snapshots=SnapshotSpec.model_validate(spec),
    )  # fmt: skip


def weights(version: int) -> dict[str, torch.Tensor]:
    state = torch.ones(20_000)
    state[: version * 11] += 1
    return {"w": state}


def test_every_so_many_versions_one_goes_into_the_store_whole(tmp_path: Path) -> None:
    objects = MemoryObjects()
    learner = sink(tmp_path, objects, keyframe_every=4)
    sent = []
    for version in range(10):
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
