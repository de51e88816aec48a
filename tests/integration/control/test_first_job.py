"""The first job of a service costs the others nothing: what its task needs was imported before anybody was answered."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

SCRIPT = """
import asyncio, json, sys
from pathlib import Path
import httpx
from app.main import create_app
from app.settings import Settings

async def main():
    settings = Settings(state_dir=Path(sys.argv[1]), admin_key="ek_admin", providers=("marketplace",),
                        marketplace_url="http://127.0.0.1:9")
    app = create_app(settings)
    async with app.router.lifespan_context(app):
        transport, head = httpx.ASGITransport(app=app), {"Authorization": "Bearer ek_admin"}
        async with httpx.AsyncClient(transport=transport, base_url="http://t", headers=head, timeout=60) as http:
            assert (await http.get("/healthz")).status_code == 200
            before = set(sys.modules)
            answer = await http.post("/v1/jobs", json=json.loads(sys.argv[2]))
            assert answer.status_code == 201, answer.text
            new = sorted(set(sys.modules) - before)
            answer = await http.post("/v1/jobs/" + answer.json()["id"] + "/cancel")
            assert answer.status_code == 202, answer.text
    print(json.dumps(new))

asyncio.run(main())
"""
JOB = {
    "model": "tiny",
    "task": {"name": "reasoning_gym", "params": {"dataset": "spell_backward"}},
    "budget_usd": "1",
    "stop": {"steps": 1},
    # Its learner is started by somebody else: not here.
    "learner": {"placement": "attached"},
}


def test_the_first_post_of_a_job_imports_no_package_of_tasks(tmp_path: Path) -> None:
    """An import of seconds lets the loop turn too rarely, in whatever thread it runs."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tmp_path), json.dumps(JOB)], capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr[-3000:]
    new = json.loads(done.stdout.splitlines()[-1])
    assert [name for name in new if name.partition(".")[0] in ("reasoning_gym", "sympy")] == []
    assert len(new) < 50, new
