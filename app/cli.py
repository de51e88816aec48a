"""`echo2`: the command line. Composes; decides nothing.

Exit status: 0 done, 1 failed, 2 bad usage or bad settings. Heavy packages are imported by the command that needs them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from app.protocol.errors import EchoError, Unavailable

app = typer.Typer(no_args_is_help=True, add_completion=False, help="Cheap GPUs for RL post-training.")
job_app = typer.Typer(no_args_is_help=True, help="Jobs.")
keys_app = typer.Typer(no_args_is_help=True, help="API keys.")
app.add_typer(job_app, name="job")
app.add_typer(keys_app, name="keys")

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead of a table.")]


def _id(value: str | None) -> str | None:
    """An id: it becomes part of an address, where another text would ask for something else. Raises BadParameter."""
    if value is not None and not re.fullmatch(r"[A-Za-z0-9_-]+", value):
        raise typer.BadParameter(f"{value!r} is not an id: those are of letters, digits, - and _")
    return value


Id = Annotated[str, typer.Argument(callback=_id)]
JobOrAll = Annotated[str | None, typer.Argument(callback=_id)]


def _logging(level: str = "INFO") -> None:
    logging.basicConfig(level=level.upper(), format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    for noisy in ("httpx", "apscheduler", "alembic"):
        logging.getLogger(noisy).setLevel(logging.WARNING)


def _show_key(key: str) -> None:
    print(f"admin key, shown this once: {key}", file=sys.stderr, flush=True)


@app.command()
def serve() -> None:
    """Run the control service (settings: ECHO2_*)."""
    from app.serve import serve as run
    from app.settings import load_settings

    settings = load_settings()
    _logging(settings.log_level)
    run(settings, _show_key)


@app.command()
def marketplace(
    port: Annotated[int, typer.Option(help="Port on 127.0.0.1.")] = 8090,
    control: Annotated[bool, typer.Option("--control", help="Open the control side, /_market/…")] = False,
    machines: Annotated[Path | None, typer.Option(help="Price list, TOML.")] = None,
    speed: Annotated[float, typer.Option(help="Machines so many times as fast as the price list says.")] = 1.0,
) -> None:
    """Run the local marketplace alone. Its key: ECHO2_MARKETPLACE_API_KEY."""
    from providers.marketplace.config import DEFAULT_MACHINES, ConfigError, MarketConfig
    from providers.marketplace.server import serve as run

    _logging()
    key = os.environ.get("ECHO2_MARKETPLACE_API_KEY", "")
    if not key:
        raise typer.BadParameter("ECHO2_MARKETPLACE_API_KEY is not set: choose a key that clients must send")
    state = Path(os.environ.get("ECHO2_STATE_DIR", ".echo2")).absolute() / "marketplace"
    config = MarketConfig(
        state_dir=state, api_key=key, port=port, control_enabled=control, machines_file=machines or DEFAULT_MACHINES,
        speed=speed,
    )  # fmt: skip
    try:
        asyncio.run(run(config, lambda url: print(f"marketplace at {url}", flush=True)))
    except ConfigError as error:
        raise Unavailable(f"the marketplace can't start: {error}") from error


@app.command()
def agent() -> None:
    """Be a rollout agent: ECHO2_CONTROL_URL and ECHO2_JOIN_TOKEN say for whom."""
    from app.rollout_agent.__main__ import run_agent

    _logging()
    raise typer.Exit(run_agent())


@app.command()
def learner(
    job: Annotated[str, typer.Option(help="Job id.")],
    url: Annotated[str | None, typer.Option(help="The control service. [default: ECHO2_CONTROL_URL]")] = None,
    token: Annotated[str | None, typer.Option(help="Learner token. [default: ECHO2_LEARNER_TOKEN]")] = None,
    state_dir: Annotated[Path | None, typer.Option(help="Checkpoints, cache. [default: ECHO2_STATE_DIR]")] = None,
) -> None:
    """Be the learner of a job, on one GPU; on several: torchrun -m app.learner, with the same options."""
    from app.learner.process import main as run

    where = None if state_dir is None else str(state_dir.absolute())
    raise typer.Exit(run(job, control_url=url, learner_token=token, state_dir=where))


@app.command("bench-node")
def bench_node(
    model: Annotated[str, typer.Option(help="A model folder, or `tiny`.")] = "tiny",
    engine: Annotated[str | None, typer.Option(help="transformers or vllm. [default: ECHO2_ENGINE]")] = None,
    concurrency: Annotated[str, typer.Option(help="Completions at once, with commas between.")] = "1,4,16,64",
    max_tokens: Annotated[int, typer.Option(min=1, max=32_768, help="Of each completion.")] = 64,
    gpu_name: Annotated[str, typer.Option(help="As the marketplace calls it. [default: the driver's name]")] = "",
    down_url: Annotated[str | None, typer.Option(help="What to GET to measure the downlink.")] = None,
    up_url: Annotated[str | None, typer.Option(help="Where to PUT to measure the uplink.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="One line of JSON, for ECHO2_PRIORS_FILE.")] = False,
) -> None:
    """Measure this machine: tokens/s, the swap of a version, its links."""
    from app.rollout_agent.bench_cli import run

    _logging("warning")
    counts = [int(part) if part.strip().isdecimal() else 0 for part in concurrency.split(",")]
    if not all(1 <= count <= 4096 for count in counts):
        raise typer.BadParameter("--concurrency must be numbers from 1 to 4096 with commas between, such as 1,4,16,64")
    print(run(model, engine, counts, max_tokens, gpu_name=gpu_name, urls=(down_url, up_url), as_json=as_json))


@app.command()
def demo(
    steps: Annotated[int | None, typer.Option(min=30, help="Learner steps. [default: 100, vllm 60]")] = None,
    plain: Annotated[bool, typer.Option("--plain", help="Lines instead of the live view.")] = False,
    engine: Annotated[str, typer.Option(help="transformers, or vllm (make demo-vllm).")] = "transformers",
) -> None:
    """A whole job on this machine: rent, train, lose a machine, see a price move, give everything back."""
    from app.demo import NODES, run

    if engine not in NODES:
        raise typer.BadParameter(f"--engine must be one of {', '.join(NODES)}")
    raise typer.Exit(run(steps=steps, plain=plain, engine=engine))


@app.command()
def reap(
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only tell what would be destroyed.")] = False,
    as_json: Json = False,
) -> None:
    """Destroy what carries this fleet's label and has no live lease; works without the control service."""
    from dataclasses import asdict

    from app.reap import reap as run
    from app.reap import status, text
    from app.settings import load_settings

    _logging("warning")
    findings = asyncio.run(run(load_settings(), dry_run=dry_run))
    print(json.dumps([asdict(f) for f in findings], indent=2) if as_json else text(findings))
    raise typer.Exit(status(findings))


PAGE = 1000
"""The most that a list gives at once; a table tells in its last line when there is more."""
SUBMIT_S = 330.0
"""A task may take five minutes to load, and the job is answered for when that is done."""


def _call(
    method: str, path: str, body: Any = None, *, text: bool = False, patience_s: float | None = None, **params: Any
) -> Any:
    from app.client import call

    return call(method, path, body, text=text, params=params, patience_s=patience_s)


def _print(path: str, as_json: bool, **params: Any) -> None:
    answer = _call("GET", path, text=not as_json, **params)
    print(json.dumps(answer, indent=2) if as_json else answer.rstrip())


@job_app.command("submit")
def job_submit(
    file: Annotated[str, typer.Argument(help="JSON file, or - for standard input.")], as_json: Json = False
) -> None:
    """Start a job."""
    try:
        raw = sys.stdin.buffer.read() if file == "-" else Path(file).read_bytes()
    except OSError as error:
        raise typer.BadParameter(f"{file} can't be read: {error.strerror}") from error
    try:
        json.loads(raw)
    except (ValueError, RecursionError) as error:
        raise typer.BadParameter(f"{file} is not JSON: {error}") from error
    answer = _call("POST", "/v1/jobs", raw, patience_s=SUBMIT_S)
    print(json.dumps(answer, indent=2) if as_json else answer["id"])


@job_app.command("list")
def job_list(as_json: Json = False) -> None:
    """Jobs, newest first: as many as one page holds."""
    _print("/v1/jobs", as_json, limit=PAGE)


@job_app.command("show")
def job_show(job_id: Id, as_json: Json = False) -> None:
    """One job."""
    _print(f"/v1/jobs/{job_id}", as_json)


@job_app.command("watch")
def job_watch(job_id: Id) -> None:
    """Follow a job until it ends; exit 0 only if it succeeded."""
    from app.watch import watch

    raise typer.Exit(watch(job_id))


@job_app.command("learner-token")
def job_learner_token(job_id: Id, as_json: Json = False) -> None:
    """What an attached learner is started with."""
    answer = _call("POST", f"/v1/jobs/{job_id}/learner-token")
    print(json.dumps(answer, indent=2) if as_json else answer["token"])


@job_app.command("cancel")
def job_cancel(job_id: Id, as_json: Json = False) -> None:
    """End a job: its model is saved, its nodes are given back."""
    answer = _call("POST", f"/v1/jobs/{job_id}/cancel")
    print(json.dumps(answer, indent=2) if as_json else answer["status"])


@app.command()
def fleet(job_id: JobOrAll = None, as_json: Json = False) -> None:
    """Nodes, of one job or of all."""
    _print(f"/v1/jobs/{job_id}/fleet" if job_id else "/v1/fleet", as_json)


@app.command()
def cost(job_id: JobOrAll = None, as_json: Json = False) -> None:
    """Money, of one job or of all."""
    _print(f"/v1/jobs/{job_id}/cost" if job_id else "/v1/cost", as_json)


@app.command()
def offers(job_id: JobOrAll = None, as_json: Json = False) -> None:
    """The market, as a job sees it."""
    params = {"job_id": job_id} if job_id else {}
    _print("/v1/offers", as_json, limit=PAGE, **params)


@keys_app.command("create")
def keys_create(name: str, admin: Annotated[bool, typer.Option("--admin")] = False, as_json: Json = False) -> None:
    """Make an API key; it is shown this once."""
    answer = _call("POST", "/v1/keys", {"name": name, "admin": admin})
    print(json.dumps(answer, indent=2) if as_json else f"{answer['id']} {answer['key']}")


@keys_app.command("revoke")
def keys_revoke(key_id: Id) -> None:
    """Revoke an API key."""
    _call("DELETE", f"/v1/keys/{key_id}")


def main() -> None:
    """Entry point: our errors are one line on standard error."""
    from app.settings import SettingsError

    try:
        app()
    except SettingsError as error:
        print(error.detail, file=sys.stderr)
        sys.exit(2)
    except EchoError as error:
        print(f"{error.code}: {error.detail}", file=sys.stderr)
        for item in error.errors:
            print(f"  {item.pointer}: {item.detail}", file=sys.stderr)
        sys.exit(1)
    except OSError as error:
        print(f"{error}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
