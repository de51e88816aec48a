"""Google's own library against a little Compute Engine on loopback; skipped where the extra is not installed."""

from __future__ import annotations

import importlib
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from providers.base import Billing, NoCapacity, OfferQuery, Phase, QuotaError, RentSpec
from providers.gcp import Gcp, Shape
from providers.gcp.google import _GoogleCompute

pytest.importorskip("google.cloud.compute_v1")
ZONE = "us-central1-a"
SPEC = RentSpec("echo2:Fleet:lease_1:1", "img", "echo hi", {"A": "b"}, 50.0, (7070,))


class Api(ThreadingHTTPServer):
    """Compute Engine's REST form, one zone."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.rows: dict[str, dict[str, Any]] = {}
        self.seen: list[tuple[str, str]] = []
        self.mode = ""


class _Handler(BaseHTTPRequestHandler):
    server: Api

    def log_message(self, format: str, *args: Any) -> None:
        """Silence."""

    def _out(self, status: int, body: dict[str, Any]) -> None:
        text = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def _refuse(self, status: int, reason: str, message: str) -> None:
        errors = [{"message": message, "domain": "global", "reason": reason}]
        self._out(status, {"error": {"code": status, "message": message, "errors": errors}})

    def _name(self) -> str:
        self.server.seen.append((self.command, self.path))
        return self.path.split("?")[0].rsplit("/", 1)[-1]

    def _missing(self, name: str) -> None:
        self._refuse(404, "notFound", f"The resource 'projects/p/zones/{ZONE}/instances/{name}' was not found")

    def do_POST(self) -> None:
        self._name()
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        if self.server.mode == "quota":
            return self._refuse(403, "quotaExceeded", "Quota 'PREEMPTIBLE_NVIDIA_L4_GPUS' exceeded.")
        if self.server.mode != "full":
            place = {"zone": f"https://x/zones/{ZONE}", "status": "RUNNING", "id": "12345678901234567890"}
            self.server.rows[body["name"]] = {**body, **place}
        return self._out(200, {"name": "op1", "status": "RUNNING", "id": "1"})

    def do_GET(self) -> None:
        name = self._name()
        if "/operations/" in self.path:
            room = {"errors": [{"code": "ZONE_RESOURCE_POOL_EXHAUSTED", "message": "no room"}]}
            error = {"error": room} if self.server.mode == "full" else {}
            return self._out(200, {"name": "op1", "status": "DONE", **error})
        if "aggregated" in self.path:
            empty = {"warning": {"code": "NO_RESULTS_ON_PAGE", "message": "x"}}
            scopes = {f"zones/{ZONE}": {"instances": list(self.server.rows.values())}, "zones/b": empty}
            holes = {"unreachables": ["zones/q"]} if self.server.mode == "hole" else {}
            return self._out(200, {"items": scopes, **holes})
        if name not in self.server.rows:
            return self._missing(name)
        return self._out(200, self.server.rows[name])

    def do_DELETE(self) -> None:
        name = self._name()
        if self.server.rows.pop(name, None) is None:
            return self._missing(name)
        return self._out(200, {"name": "op2", "status": "RUNNING"})


@pytest.fixture
def api() -> Iterator[Api]:
    server = Api()
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    server.server_close()
    thread.join(5)


def client(api: Api) -> _GoogleCompute:
    compute = importlib.import_module("google.cloud.compute_v1")
    anonymous = importlib.import_module("google.auth.credentials").AnonymousCredentials()
    where = {"host": f"127.0.0.1:{api.server_port}", "url_scheme": "http", "credentials": anonymous}
    instances = importlib.import_module("google.cloud.compute_v1.services.instances.transports").InstancesRestTransport
    operations = importlib.import_module("google.cloud.compute_v1.services.zone_operations.transports")
    return _GoogleCompute(
        "p", compute.InstancesClient(transport=instances(**where)),
        compute.ZoneOperationsClient(transport=operations.ZoneOperationsRestTransport(**where)),
    )  # fmt: skip


async def test_a_machines_life_through_googles_library(api: Api) -> None:
    async def no_sleep(seconds: float) -> None:
        return None

    gcp = Gcp(client(api), Shape("projects/p/global/images/family/f"), zones=(ZONE,), sleep=no_sleep)
    offer = (await gcp.search(OfferQuery(Billing.SPOT_MARKET, gpu_names=("L4",))))[0]
    made = await gcp.rent(offer, SPEC)
    assert made.outcome == "created"
    assert made.instance_id is not None
    posted = next(path for method, path in api.seen if method == "POST")
    assert posted.startswith(f"/compute/v1/projects/p/zones/{ZONE}/instances?requestId=")
    row = next(iter(api.rows.values()))
    assert row["scheduling"]["provisioningModel"] == "SPOT"
    assert row["scheduling"]["maxRunDuration"] == {"seconds": "86400"}
    listing = await gcp.list()
    assert listing.complete
    assert [(i.label, i.phase) for i in listing.instances] == [(SPEC.label, Phase.RUNNING)]
    api.mode = "hole"
    assert not (await gcp.list()).complete
    await gcp.release(made.instance_id)
    await gcp.release(made.instance_id)
    assert await gcp.get(made.instance_id) is None
    for mode, kind in (("full", NoCapacity), ("quota", QuotaError)):
        api.mode = mode
        refused = await gcp.rent(offer, RentSpec(mode, "img", "x", {}, 50.0))
        assert refused.outcome == "refused"
        assert type(refused.error) is kind
    await gcp.aclose()
