"""A learner process whose model is on a Hugging Face Hub, on loopback: what it announces and what it puts where."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from starlette.responses import JSONResponse, Response

from app.learner.tiny import tiny_model
from app.protocol.job import JobSpec
from app.storage.stores import FolderStore
from tests.integration.learner.fake_control import JOB, TOKEN, FakeService, serving
from tests.integration.learner.hub_server import REPO, SHA, HubServer
from tests.integration.learner.served import served
from tests.integration.learner.test_learner_process import CACHE, spec

WEIGHTS = f"jobs/{JOB}/model/model.safetensors"


class Idle(FakeService):
    """No fleet; `store_model` is what its directives say."""

    store_model = False

    def trajectories(self, after: int) -> Response:
        """None ever."""
        with self.lock:
            self.changed.wait(0.2)
        return JSONResponse({"items": [], "cursor": after})

    def _word(self, more: dict | None = None) -> Response:
        return super()._word({"store_model": self.store_model} | (more or {}))

    def in_store(self) -> set[str]:
        """Names of the model's files there."""
        return {Path(info.key).name for info in self.store.list(f"jobs/{JOB}/model/")}


def lora_job() -> JobSpec:
    return spec(model=REPO, learner={"lora": {"rank": 2}, "eval_prompts": 4})


@contextmanager
def learning(tmp_path: Path, hub: HubServer, token: str) -> Iterator[Idle]:
    """A learner that has come to `ready`; aborted at the end."""
    service = Idle(lora_job(), FolderStore(tmp_path / "objects"), tiny_model(CACHE))
    with served(hub.app) as endpoint, serving(service) as url, (tmp_path / "log").open("w") as log:
        env = {
            **os.environ,
            "ECHO2_CONTROL_URL": url,
            "ECHO2_LEARNER_TOKEN": TOKEN,
            "ECHO2_STATE_DIR": str(tmp_path),
            "HF_ENDPOINT": endpoint,
            "HF_HOME": str(tmp_path / "hf"),
            "HF_HUB_OFFLINE": "0",
            **({"HF_TOKEN": token} if token else {}),
        }
        command = [sys.executable, "-m", "app.learner", "--job", JOB]
        with subprocess.Popen(command, env=env, stderr=log) as process:
            try:
                service.wait(lambda: service.ready or service.done or process.poll() is not None)
                assert service.ready, (tmp_path / "log").read_text()
                yield service
            finally:
                service.command = "abort"
                try:
                    process.wait(30)
                finally:
                    process.kill()


def test_a_public_model_s_weights_are_put_into_the_store_only_when_the_hub_has_failed_a_node(tmp_path: Path):
    hub = HubServer(tiny_model(CACHE))
    with learning(tmp_path, hub, "") as service:
        assets = {a["path"]: a for a in service.ready[0]["assets"]}
        assert assets["model.safetensors"]["hub"] == {"repo": REPO, "revision": SHA}
        assert service.ready[0]["model_revision"] == SHA
        assert {n for n, a in assets.items() if a["hub"] is not None} == {"model.safetensors"}
        assert service.in_store() == assets.keys() - {"model.safetensors"}
        service.store_model = True
        service.wait(lambda: "model.safetensors" in service.in_store())
        assert service.store.get(WEIGHTS) == (tiny_model(CACHE) / "model.safetensors").read_bytes()
        assert service.done is None


def test_a_gated_model_goes_through_the_store_and_the_token_to_nobody(tmp_path: Path):
    hub = HubServer(tiny_model(CACHE), token="hf_secret")
    with learning(tmp_path, hub, "hf_secret") as service:
        assets = {a["path"]: a for a in service.ready[0]["assets"]}
        assert all(a["hub"] is None for a in assets.values())
        assert service.in_store() == assets.keys()
        assert "hf_secret" not in str(service.ready)
    assert hub.anonymous == [f"HEAD /{REPO}/resolve/{SHA}/model.safetensors"], "asked once, as a node would"
    assert "hf_secret" not in (tmp_path / "log").read_text()
