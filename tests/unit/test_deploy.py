"""The deployment files, as far as they can be checked without a container engine and without systemd."""

from __future__ import annotations

import configparser
import re
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]

from app.settings import Settings

TOP = Path(__file__).parents[2]
DEPLOY = TOP / "deploy"
BOOTSTRAP = DEPLOY / "agent" / "bootstrap.sh"
DOCKERFILES = sorted(DEPLOY.rglob("Dockerfile"))
VARIABLES = {f"ECHO2_{name.upper()}" for name in Settings.model_fields}


@pytest.mark.parametrize("dockerfile", DOCKERFILES, ids=lambda p: p.parent.name)
def test_dockerfiles_copy_what_is_there_and_install_what_exists(dockerfile: Path) -> None:
    text = dockerfile.read_text().replace("\\\n", " ")
    for line in re.findall(r"^COPY (.+)$", text, re.MULTILINE):
        *sources, _ = line.split()
        assert [s for s in sources if not (TOP / s).exists()] == []
    extras = re.findall(r"'\.\[([a-z,]+)\]'", text)
    known = tomllib.loads((TOP / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert extras
    assert {name for group in extras for name in group.split(",")} <= set(known)
    assert set(re.findall(r"ECHO2_[A-Z_]+(?==)", text)) <= VARIABLES
    assert re.search(r'^CMD \["echo2", "(agent|serve)"\]$', text, re.MULTILINE)


def compose() -> dict[str, Any]:
    value = yaml.safe_load((DEPLOY / "control" / "compose.yaml").read_text())
    assert isinstance(value, dict)
    return value


def test_compose_names_what_exists() -> None:
    services = compose()["services"]
    assert set(services) == {"control", "database", "objects", "bucket"}
    assert {n for n in services["control"]["environment"] if n.startswith("ECHO2_")} <= VARIABLES
    volumes = {mount.partition(":")[0] for s in services.values() for mount in s.get("volumes", [])}
    assert volumes == set(compose()["volumes"])
    for service in services.values():
        assert set(service.get("depends_on", {})) <= set(services)
        if "build" in service:
            context = (DEPLOY / "control" / service["build"]["context"]).resolve()
            assert context == TOP
            assert (context / service["build"]["dockerfile"]).is_file()


def test_compose_s_settings_are_taken_by_the_service(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    values = {
        "ECHO2_PUBLIC_URL": "https://echo2.example.org",
        "ECHO2_ADMIN_KEY": "a",
        "ECHO2_VASTAI_API_KEY": "b",
        "POSTGRES_PASSWORD": "c",
        "S3_PUBLIC_URL": "https://objects.example.org",
        "S3_ACCESS_KEY": "d",
        "S3_SECRET_KEY": "e",
    }
    for name, text in compose()["services"]["control"]["environment"].items():
        filled = re.sub(r"\$\{([A-Z0-9_]+):[-?]\}", lambda m: values.get(m[1], ""), str(text))
        assert "$" not in filled
        monkeypatch.setenv(name, filled)
    settings = Settings(state_dir=tmp_path)
    assert settings.database_url == "postgresql+asyncpg://echo2:c@database/echo2"
    assert settings.object_store_url == "s3://echo2"
    assert settings.webhook_secret is None


def test_the_bucket_s_program_compiles() -> None:
    python, flag, program = compose()["services"]["bucket"]["command"]
    assert (python, flag) == ("python", "-c")
    compile(program, "bucket", "exec")


def test_the_unit_serves() -> None:
    unit = configparser.RawConfigParser(strict=False)
    unit.optionxform = str  # type: ignore[assignment,method-assign]
    unit.read(DEPLOY / "control" / "echo2.service")
    assert unit.sections() == ["Unit", "Service", "Install"]
    assert unit["Service"]["ExecStart"].split()[1:] == ["serve"]
    assert unit["Service"]["KillMode"] == "process"
    assert unit["Service"]["Environment"].partition("=")[0] in VARIABLES
    # The state folder is the one place that ProtectSystem=strict leaves writable.
    assert unit["Service"]["Environment"].endswith("/var/lib/" + unit["Service"]["StateDirectory"])


def test_bootstrap_is_a_script_that_says_what_it_lacks(tmp_path: Path) -> None:
    assert BOOTSTRAP.stat().st_mode & 0o111
    subprocess.run(["bash", "-n", str(BOOTSTRAP)], check=True, timeout=10)
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    bare = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=10)
    assert bare.returncode != 0
    assert "ECHO2_CONTROL_URL" in bare.stderr
    no_token = subprocess.run(
        ["sh", str(BOOTSTRAP)],
        env={**env, "ECHO2_CONTROL_URL": "http://127.0.0.1:1"},
        capture_output=True,
        text=True,
        timeout=10,
    )
    assert "ECHO2_JOIN_TOKEN" in no_token.stderr
    assert list(tmp_path.iterdir()) == []


def test_bootstrap_installs_once_and_becomes_the_agent(tmp_path: Path) -> None:
    """With a stand-in for Python that writes down what it is asked to do."""
    calls = tmp_path / "calls"
    fake = tmp_path / "python"
    fake.write_text(
        f"""#!/bin/sh
echo "$@" >> {calls}
if [ "$1 $2" = "-m venv" ]; then
  mkdir -p "$3/bin"
  cp "$0" "$3/bin/python"
elif [ "$2" = "pip" ]; then
  printf '#!/bin/sh\\necho "agent $1 in $PWD"\\n' > "$(dirname "$0")/echo2"
  chmod +x "$(dirname "$0")/echo2"
fi
"""
    )
    fake.chmod(0o755)
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(fake), "ECHO2_CONTROL_URL": "http://127.0.0.1:1",
        "ECHO2_JOIN_TOKEN": "jt_x", "ECHO2_AGENT_PACKAGE": "echo2[agent] @ https://files.example.org/echo2.whl",
    }  # fmt: skip
    for _ in range(2):
        ran = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=10, check=True)
        assert ran.stdout == f"agent agent in {tmp_path}/echo2\n"
    installs = [line for line in calls.read_text().splitlines() if "pip install" in line]
    assert len(installs) == 1
    assert installs[0].endswith("echo2[agent] @ https://files.example.org/echo2.whl")
    assert "jt_x" not in calls.read_text()
