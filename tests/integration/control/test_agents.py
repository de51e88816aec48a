"""What a bare machine asks for before it has anything to prove itself with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from importlib import metadata
from pathlib import Path

from tests.integration.control.rig import World

OpenWorld = Callable[..., AbstractAsyncContextManager[World]]
PATH = "/v1/agent/constraints"


async def test_exact_versions_are_those_of_the_service_and_need_no_key(control: World) -> None:
    plain = await control.http.get(PATH, headers={"Authorization": ""})
    assert plain.status_code == 200
    assert plain.headers["content-type"].startswith("text/plain")
    assert f"blake3=={metadata.version('blake3')}" in plain.text.splitlines()
    assert any(line.startswith("torch==") for line in plain.text.splitlines())
    vllm = await control.http.get(PATH, params={"engine": "vllm"})
    assert not any(line.startswith("torch==") for line in vllm.text.splitlines())
    assert (await control.http.get(PATH, params={"engine": "../x"})).status_code == 422


async def test_the_operator_s_file_is_handed_out_as_it_is_or_named(open_world: OpenWorld, tmp_path: Path) -> None:
    own = tmp_path / "exact.txt"
    own.touch()
    async with open_world(agent_constraints=own) as control:
        own.unlink()
        missing = await control.http.get(PATH)
        assert missing.status_code == 503
        assert "ECHO2_AGENT_CONSTRAINTS" in missing.json()["detail"]
        assert str(own) not in missing.text
        own.write_text("torch==2.6.0\n")
        assert (await control.http.get(PATH)).text == "torch==2.6.0\n"
