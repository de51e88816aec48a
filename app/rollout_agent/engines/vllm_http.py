"""The engine's server over HTTP: one method a call that we make.

Invariant: every call has a timeout, goes to loopback without a proxy, and an answer that is not 200 is an error. A
server that refuses a request is told from one that can't answer: BadInput and Unavailable.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

import httpx

from app.protocol.errors import BadInput, Unavailable
from app.rollout_agent.engines.vllm_command import BASE_NAME, HOST
from app.rollout_agent.engines.vllm_features import CHECKSUM_ROUTE
from app.rollout_agent.engines.vllm_lanes import Lanes

CONNECT_S = 5.0
CONTROL_S = 30.0
"""Calls that only tell the scheduler something."""
PAUSE_S = 120.0
"""The step that runs has to end first."""
LOAD_S = 600.0
"""Reading a version from disk and copying it in."""
CHECK_S = 300.0
"""Every worker hashes its part of the model, on one core."""
REQUEST_S = 4 * 3600.0
"""The longest completion. A dead server ends the connection long before."""
COPY_HEADER = "X-data-parallel-rank"
URGENT = -1
"""Priority of our own probes: before all that waits."""


class EngineHttp:
    """Calls to one server."""

    def __init__(self, port: int, key: str, *, transport: httpx.AsyncBaseTransport | None = None) -> None:
        self.base_url = f"http://{HOST}:{port}"
        self._http = httpx.AsyncClient(
            base_url=self.base_url,
            headers={"Authorization": f"Bearer {key}"},
            trust_env=False,
            transport=transport or Lanes(),
        )

    async def aclose(self) -> None:
        """Close the connections."""
        await self._http.aclose()

    async def up(self) -> bool:
        """Whether the server answers at all. That says nothing of its engine."""
        try:
            return (await self._call("GET", "/health", timeout_s=CONNECT_S)).status_code == 200
        except (Unavailable, BadInput):
            return False

    async def version(self) -> str:
        """vLLM's own version."""
        return str((await self._json("GET", "/version"))["version"])

    async def paths(self) -> set[str]:
        """Every path that the server has."""
        return set((await self._json("GET", "/openapi.json"))["paths"])

    async def generate(
        self,
        token_ids: Sequence[int],
        sampling: Mapping[str, Any],
        *,
        request_id: str,
        salt: str,
        model: str = BASE_NAME,
        priority: int = 0,
        copy: int | None = None,
        timeout_s: float = REQUEST_S,
    ) -> dict[str, Any]:
        """Token ids in, token ids out. `copy`: the one of the model's copies that is asked; else that with least to
        do."""
        body = {
            "request_id": request_id,
            "model": model,
            "token_ids": list(token_ids),
            "sampling_params": dict(sampling),
            "cache_salt": salt,
            "priority": priority,
        }
        headers = {} if copy is None else {COPY_HEADER: str(copy)}
        return await self._json("POST", "/inference/v1/generate", body, headers=headers, timeout_s=timeout_s)

    async def pause(self, mode: Literal["keep", "abort"]) -> None:
        """Stop the scheduler and forget every cached key and value; what runs is kept, or comes back as it is."""
        await self._call("POST", "/pause", params={"mode": mode, "clear_cache": "true"}, timeout_s=PAUSE_S)

    async def resume(self) -> None:
        """Go on."""
        await self._call("POST", "/resume")

    async def load_weights(self, path: str) -> list[dict[str, Any]]:
        """Fill the weights from a file; each worker's account of it."""
        body = {"method": "echo2_load", "kwargs": {"path": path}, "timeout": LOAD_S}
        answer = await self._json("POST", "/collective_rpc", body, timeout_s=LOAD_S)
        return [dict(result) for result in answer["results"]]

    async def checksums(self) -> dict[str, str]:
        """SHA-256 (hex) of each parameter as each worker holds it; nothing is generated meanwhile."""
        answer = await self._json("POST", CHECKSUM_ROUTE, {"action": "checksum"}, timeout_s=CHECK_S)
        found = answer.get("checksums")
        if not isinstance(found, dict) or not found or not all(isinstance(sha, str) for sha in found.values()):
            raise Unavailable(f"the engine's answer to {CHECKSUM_ROUTE} has no checksums")
        return found

    async def label(self, version: int) -> None:
        """Tokens from now on are of this version."""
        await self._call("POST", "/update_weight_version", {"new_version": str(version)})

    async def abort(self, request_ids: Sequence[str]) -> None:
        """Cut these requests; they are answered with what they have. Unknown ones are ignored."""
        prefixed = [f"generate-tokens-{name}" for name in request_ids]
        await self._call("POST", "/abort_requests", {"request_ids": prefixed})

    async def load_adapter(self, name: str, path: str) -> None:
        """Make an adapter known by a name."""
        await self._call("POST", "/v1/load_lora_adapter", {"lora_name": name, "lora_path": path}, timeout_s=PAUSE_S)

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter."""
        await self._call("POST", "/v1/unload_lora_adapter", {"lora_name": name})

    async def metrics(self) -> str:
        """Prometheus text."""
        return (await self._call("GET", "/metrics")).text

    async def _json(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = CONTROL_S,
    ) -> dict[str, Any]:
        answer = await self._call(method, path, body, headers=headers, timeout_s=timeout_s)
        try:
            found = answer.json()
        except ValueError as error:
            raise Unavailable(f"the engine's answer to {path} is not JSON") from error
        if not isinstance(found, dict):
            raise Unavailable(f"the engine's answer to {path} is not an object")
        return found

    async def _call(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        params: Mapping[str, str] | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float = CONTROL_S,
    ) -> httpx.Response:
        if self._http.is_closed:
            raise Unavailable("the engine was ended")
        timeout = httpx.Timeout(timeout_s, connect=CONNECT_S, pool=CONNECT_S)
        try:
            answer = await self._http.request(method, path, json=body, params=params, headers=headers, timeout=timeout)
        except httpx.HTTPError as error:
            raise Unavailable(f"the engine does not answer {path}: {type(error).__name__} {error}"[:300]) from error
        if answer.status_code == 200:
            return answer
        text = f"the engine answers {answer.status_code} to {path}: {answer.text}"[:500]
        raise BadInput(text) if answer.status_code in (400, 413, 422) else Unavailable(text)
