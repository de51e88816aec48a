"""A stand-in for vLLM's server, with its routes and its manners, and the interpreter that "has" it.

Run as `vllm.entrypoints.openai.api_server` of a package that `interpreter` writes. How it behaves is read anew for each
request from the JSON file that VLLM_FAKE_PLAN names, where every call is noted, too.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import importlib
import json
import os
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any


def interpreter(folder: Path, *, version: str = "0.32.0") -> str:
    """An executable that is this interpreter with a package `vllm` of the given version."""
    package = folder / "site" / "vllm" / "entrypoints" / "openai"
    package.mkdir(parents=True)
    for part in (package, package.parent, package.parent.parent):
        (part / "__init__.py").touch()
    shutil.copyfile(__file__, package / "api_server.py")
    info = folder / "site" / f"vllm-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n")
    script = folder / "python"
    script.write_text(f'#!/bin/sh\nexport PYTHONPATH="{folder / "site"}:$PYTHONPATH"\nexec {sys.executable} "$@"\n')
    script.chmod(0o755)
    return str(script)


class Plan:
    """The test's side of the file: what the server should do, and what it was asked."""

    def __init__(self, folder: Path) -> None:
        self.path = folder / "plan.json"
        self.calls_path = folder / "calls.jsonl"
        self.calls_path.touch()
        self.set()

    def set(self, **how: Any) -> None:
        """From the next request on."""
        part = self.path.with_suffix(".part")
        part.write_text(json.dumps(how))
        part.replace(self.path)

    @property
    def env(self) -> dict[str, str]:
        """What the server has to be given."""
        return {**os.environ, "VLLM_FAKE_PLAN": str(self.path), "ECHO2_JOIN_TOKEN": "s3cret"}

    def calls(self, path: str) -> list[dict[str, Any]]:
        """Bodies and parameters of the calls to a path so far."""
        lines = [json.loads(line) for line in self.calls_path.read_text().splitlines()]
        return [line["body"] for line in lines if line["path"] == path]

    def order(self) -> list[str]:
        """Paths in the order in which they were called, without what only looks."""
        lines = [json.loads(line)["path"] for line in self.calls_path.read_text().splitlines()]
        return [p for p in lines if p not in ("/health", "/openapi.json", "/metrics", "/version")]


class Server:
    """State of the stand-in: a pause, a label, requests that run."""

    def __init__(self) -> None:
        self.plan_path = Path(os.environ["VLLM_FAKE_PLAN"])
        self.label = "default"
        self.adapters: set[str] = set()
        self.going = asyncio.Event()
        self.going.set()
        self.running: set[str] = set()
        self.aborted: set[str] = set()
        self.made = Counter({"0": 0})
        """Copy of the model → its tokens."""
        self.held: dict[str, str] = {}
        """Parameter → checksum, of those that the plan names; of the bytes as they are in the file."""

    def plan(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.plan_path.read_text())
        return found

    async def answer(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        with (self.plan_path.parent / "calls.jsonl").open("a") as file:
            file.write(json.dumps({"path": path, "body": body}) + "\n")
        how = self.plan().get(path, "")
        if how == "hang":
            await asyncio.sleep(600)
        if how == "die":
            print("no memory is left", file=sys.stderr, flush=True)
            os._exit(3)
        if isinstance(how, int):
            return how, {"error": "as planned"}
        handler = {
            "/inference/v1/generate": self.generate,
            "/collective_rpc": self.load,
            "/pause": self.pause,
            "/resume": self.resume,
            "/update_weight_version": self.relabel,
            "/weight_checker": self.checksums,
            "/abort_requests": self.abort,
            "/v1/load_lora_adapter": self.load_adapter,
            "/v1/unload_lora_adapter": self.unload_adapter,
        }.get(path)
        return (200, await handler(body)) if handler else (200, self.look(path))

    def look(self, path: str) -> Any:
        if path == "/version":
            return {"version": "0.32.0"}
        if path == "/openapi.json":
            gone = self.plan().get("without", [])
            routes = ["/inference/v1/generate", "/pause", "/resume", "/abort_requests", "/collective_rpc"]
            routes += ["/update_weight_version", "/v1/load_lora_adapter", "/v1/unload_lora_adapter"]
            routes += ["/weight_checker"] if "parameters" in self.plan() else []
            return {"paths": {route: {} for route in routes if route not in gone}}
        if path == "/metrics":
            return (
                f'vllm:num_requests_running{{engine="0"}} {len(self.running)}\n'
                'vllm:num_requests_waiting{engine="0"} 2\nvllm:kv_cache_usage_perc{engine="0"} 0.25\n'
                'vllm:num_preemptions_total{engine="0"} 1\n'
            ) + "".join(f'vllm:generation_tokens_total{{engine="{n}"}} {made}\n' for n, made in self.made.items())
        return {}

    async def generate(self, body: dict[str, Any]) -> Any:
        ids, sampling, name = body["token_ids"], body["sampling_params"], f"generate-tokens-{body['request_id']}"
        tokens: list[int] = []
        labels: list[str] = []
        self.running.add(name)
        if body.get("copy") and body["copy"] == self.plan().get("stuck"):
            await asyncio.sleep(600)
        while len(tokens) < sampling["max_tokens"] and name not in self.aborted:
            await asyncio.sleep(self.plan().get("token_s", 0))
            if name in self.aborted:
                # While it slept; a token from now on would be of the next version.
                break
            if not self.going.is_set():
                await asyncio.sleep(0.01)
                continue
            tokens.append(50 + (sum(ids) + len(tokens)) % 100)
            labels.append(self.label)
            self.made[body.get("copy", "0")] += 1
        self.running.discard(name)
        starts = [i for i, label in enumerate(labels) if i == 0 or labels[i - 1] != label]
        spans = [{"version": labels[i], "start": i, "end": len(tokens)} for i in starts]
        content = [{"token_id": t, "logprob": -0.5, "rank": 1, "top_logprobs": []} for t in tokens]
        choice: dict[str, Any] = {"index": 0, "token_ids": tokens, "logprobs": {"content": content}}
        choice["finish_reason"] = "abort" if name in self.aborted else "length"
        choice["weight_versions"] = spans
        off = self.plan().get("off", {}).get(body.get("copy"), 0.0)
        prompt = (
            [None, *({str(t): {"logprob": -0.25 - off}} for t in ids[1:])] if "prompt_logprobs" in sampling else None
        )
        return {"choices": [choice], "prompt_logprobs": prompt}

    async def load(self, body: dict[str, Any]) -> Any:
        await self.checksums({})
        path = Path(body["kwargs"]["path"])
        for name, data in tensors(path) if self.held else ():
            if name in self.held and name not in self.plan().get("not_taken", []):
                self.held[name] = hashlib.sha256(data).hexdigest()
        report = {"read": self.plan().get("read", 24), "missing": self.plan().get("missing", []), "short": []}
        return {"results": [report]}

    async def checksums(self, body: dict[str, Any]) -> Any:
        self.held = self.held or dict.fromkeys(self.plan().get("parameters", []), "of no version")
        return {"checksums": {f"dp0:pp0:pcp0:tp0:{name}": sha for name, sha in self.held.items()}}

    async def pause(self, body: dict[str, Any]) -> Any:
        self.going.clear()
        if body.get("mode") == "abort":
            self.aborted |= self.running
        return {}

    async def resume(self, body: dict[str, Any]) -> Any:
        self.going.set()
        return {}

    async def relabel(self, body: dict[str, Any]) -> Any:
        self.label = body["new_version"]
        return {}

    async def abort(self, body: dict[str, Any]) -> Any:
        self.aborted |= set(body["request_ids"])
        return {}

    async def load_adapter(self, body: dict[str, Any]) -> Any:
        self.adapters.add(body["lora_name"])
        return {}

    async def unload_adapter(self, body: dict[str, Any]) -> Any:
        self.adapters.remove(body["lora_name"])
        return {}


def tensors(path: Path) -> list[tuple[str, bytes]]:
    """Name and bytes of what is in a safetensors file."""
    data = path.read_bytes()
    begin = 8 + int.from_bytes(data[:8], "little")
    fields = json.loads(data[8:begin])
    at = {name: field["data_offsets"] for name, field in fields.items() if name != "__metadata__"}
    return [(name, data[begin + first : begin + last]) for name, (first, last) in at.items()]


def main() -> None:
    """Serve as vLLM does: with the middleware that it was told, on the address that it was told."""
    import uvicorn
    from starlette.applications import Starlette
    from starlette.middleware import Middleware
    from starlette.requests import Request
    from starlette.responses import JSONResponse, PlainTextResponse, Response
    from starlette.routing import Route

    parser = argparse.ArgumentParser()
    for option in ("--host", "--port", "--middleware"):
        parser.add_argument(option)
    options, _ = parser.parse_known_args()
    plan = json.loads(Path(os.environ["VLLM_FAKE_PLAN"]).read_text())
    if plan.get("start") == "fail":
        sys.exit("ValueError: no room for the key/value cache")
    server = Server()

    async def endpoint(request: Request) -> Response:
        body = dict(request.query_params)
        if request.method == "POST" and (raw := await request.body()):
            body |= json.loads(raw)
        if copy := request.headers.get("X-data-parallel-rank"):
            body["copy"] = copy
        status, found = await server.answer(request.url.path, body)
        return PlainTextResponse(found) if isinstance(found, str) else JSONResponse(found, status)

    module, name = options.middleware.rsplit(".", 1)
    guard = getattr(importlib.import_module(module), name)
    route = Route("/{path:path}", endpoint, methods=["GET", "POST"])
    app = Starlette(routes=[route], middleware=[Middleware(guard)])
    uvicorn.run(app, host=options.host, port=int(options.port), log_level="warning")


if __name__ == "__main__":
    main()
