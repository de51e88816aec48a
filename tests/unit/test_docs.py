"""The documents say what the code does: names, defaults, calls, examples and links are held against it."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from prometheus_client.metrics import MetricWrapperBase
from pydantic.fields import FieldInfo

from app.fleet.metrics import Metrics
from app.learner.config import LearnerSettings
from app.main import build_services, create_app
from app.protocol import errors
from app.protocol.job import JobSpec
from app.protocol.task_spec import TaskLimits
from app.rollout_agent.config import AgentSettings
from app.settings import Settings
from app.tasks.registry import check_task

TOP = Path(__file__).parents[2]
PAGES = sorted([*TOP.glob("*.md"), *(TOP / "docs").rglob("*.md"), *(TOP / "deploy").rglob("*.md")])
OPERATIONS = TOP / "docs" / "operations.md"
README = TOP / "README.md"
LINK = re.compile(r"(?<!\!)\[[^\]\n]+\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """A page without its fenced code."""
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)


def section(page: Path, title: str) -> str:
    """The text under a heading, up to the next one of its level."""
    _, _, rest = page.read_text().partition(f"\n## {title}\n")
    assert rest, f"{page.name} has no section {title}"
    return rest.partition("\n## ")[0]


def rows(text: str) -> list[list[str]]:
    """The cells of a Markdown table's rows, without head and rule."""
    lines = [line for line in text.splitlines() if line.startswith("|")]
    table = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]
    return table[2:]


def names(cell: str) -> list[str]:
    """What stands in backticks."""
    return re.findall(r"`([^`]+)`", cell)


def slug(heading: str) -> str:
    """The anchor that GitHub makes of a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    return {slug(line.lstrip("#")) for line in prose(page).splitlines() if line.startswith("#")}


def shown(field: FieldInfo) -> str | None:
    """A default as the tables write it; None where it is made or absent, which they say in words."""
    value = field.default
    if field.default_factory is not None or value is None:
        return None
    if isinstance(value, bool):
        return str(value).lower()
    return ",".join(value) if isinstance(value, list) else str(value)


@pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(TOP)))
def test_links_lead_somewhere(page: Path) -> None:
    broken = []
    for target in LINK.findall(prose(page)):
        if target.startswith(("https://", "http://", "mailto:")):
            continue
        path, _, anchor = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists() or (anchor and anchor not in anchors(there)):
            broken.append(target)
    assert broken == []


def test_every_page_is_in_the_index() -> None:
    index = TOP / "docs" / "README.md"
    linked = {(index.parent / t.partition("#")[0]).resolve() for t in LINK.findall(index.read_text())}
    assert {p for p in PAGES if p.parent.name == "docs"} - {index} <= linked


def test_the_settings_table_is_the_settings() -> None:
    table = {names(row[0])[0]: row[1] for row in rows(section(OPERATIONS, "Settings"))}
    assert list(table) == list(Settings.model_fields)
    for name, field in Settings.model_fields.items():
        default = shown(field)
        if default is not None:
            assert names(table[name]) == [default], name


def test_the_readme_s_settings_exist_with_these_defaults() -> None:
    found = 0
    for setting, default, _ in rows(section(README, "Settings")):
        fields = [Settings.model_fields[name.removeprefix("ECHO2_").lower()] for name in names(setting)]
        fixed = [text for field in fields if (text := shown(field)) is not None]
        assert not fixed or names(default) == fixed
        found += len(fields)
    assert found >= 10


def test_the_metrics_table_is_the_registry() -> None:
    wanted = {}
    for collector in vars(Metrics()).values():
        if isinstance(collector, MetricWrapperBase):
            (family,) = list(collector.describe())
            name = family.name.removeprefix("echo2_") + ("_total" if family.type == "counter" else "")
            wanted[name] = (family.type, list(collector._labelnames))
    table = {names(name)[0]: (kind, names(labels)) for name, kind, labels, _ in rows(section(OPERATIONS, "Metrics"))}
    assert table == wanted


def test_every_metric_of_the_registry_is_an_attribute() -> None:
    """Else the test above would not see it."""
    metrics = Metrics()
    kept = [m for m in vars(metrics).values() if isinstance(m, MetricWrapperBase)]
    seen = {family.name for m in kept for family in m.describe()}
    assert {family.name for family in metrics.registry.collect()} == seen


def test_every_call_is_in_the_api_page(tmp_path: Path) -> None:
    settings = Settings(state_dir=tmp_path)
    services = build_services(settings, providers={})
    text = (TOP / "docs" / "api.md").read_text()
    paths = create_app(settings, services=services, loop=False).openapi()["paths"]
    calls = {f"{method.upper()} {path}" for path, methods in paths.items() for method in methods}
    assert len(calls) > 30
    assert {call for call in calls if f"`{call}`" not in text} == set()
    documented = set(re.findall(r"`((?:GET|POST|PUT|PATCH|DELETE) /[^`?]*)`", text))
    assert documented - calls == set()


def code(language: str) -> Iterator[tuple[str, str]]:
    for page in PAGES:
        for block in re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE):
            yield str(page.relative_to(TOP)), block


def test_json_in_the_pages_is_json_and_its_jobs_could_run() -> None:
    jobs = []
    for page, block in code("json"):
        value = json.loads(block.replace('"ek_…"', '"ek_"'))
        if isinstance(value, dict) and {"model", "task", "budget_usd"} <= set(value):
            jobs.append((page, value))
    here = re.search(r"<<'JOB'\n(.*?)\nJOB\n", README.read_text(), re.DOTALL)
    assert here is not None
    jobs.append(("README.md", json.loads(here[1])))
    assert {page for page, _ in jobs} >= {"README.md", "docs/api.md"}
    for _, job in jobs:
        check_task(JobSpec.model_validate(job).task)


def test_the_whole_job_of_the_api_page_shows_the_defaults() -> None:
    whole = next(json.loads(b) for page, b in code("json") if page == "docs/api.md" and '"notify_url"' in b)
    least = {key: whole[key] for key in ("name", "model", "task", "budget_usd")}
    assert JobSpec.model_validate(whole) == JobSpec.model_validate(least)
    assert set(whole) == set(JobSpec.model_fields)


def test_python_in_the_pages_compiles() -> None:
    blocks = list(code("python"))
    assert blocks
    for page, block in blocks:
        # What calls an asynchronous function stands without the function around it.
        source = "async def example():\n" + "".join(f"    {line}\n" for line in block.splitlines())
        compile(source, page, "exec")


def test_variables_in_the_pages_are_read_by_something() -> None:
    kinds = (Settings, AgentSettings, LearnerSettings)
    known = {f"ECHO2_{name.upper()}" for kind in kinds for name in kind.model_fields}
    source = "".join(
        path.read_text()
        for folder in ("app", "providers", "deploy")
        for path in sorted((TOP / folder).rglob("*"))
        if path.suffix in (".py", ".sh")
    )
    unknown = set()
    for page in PAGES:
        for name in re.findall(r"\bECHO2_[A-Z0-9_]*[A-Z0-9]\b", page.read_text()):
            if name not in known and not re.search(rf"\b{name}\b", source):
                unknown.add((page.name, name))
    # A port's own variable: the source writes its number in.
    assert {u for u in unknown if u[1] != "ECHO2_BIND_7070"} == set()


def test_the_limits_of_a_task_are_those_of_its_page() -> None:
    text = (TOP / "docs" / "tasks.md").read_text().partition("| `task.limits` |")[2].partition("\n\n")[0]
    shown = dict(re.findall(r"^\| `(\w+)` \| (\S+) \|", text, re.MULTILINE))
    defaults = TaskLimits().model_dump(mode="json")
    assert shown == {name: json.dumps(value).removesuffix(".0") for name, value in defaults.items()}


def test_every_error_that_crosses_the_boundary_is_in_the_api_page() -> None:
    found = re.findall(r"^\| (\d{3}) \| `([a-z_]+)` \|", section(TOP / "docs" / "api.md", "Conventions"), re.MULTILINE)
    table = {code: int(status) for status, code in found}
    kinds = {kind for kind in vars(errors).values() if isinstance(kind, type) and issubclass(kind, errors.EchoError)}
    assert len({kind.code for kind in kinds}) == len(kinds)
    # Those of 405 are the framework's; those of 500 but for one stay inside.
    ours = {kind.code: kind.status for kind in kinds if kind.status != 500} | {errors.EchoError.code: 500}
    assert ours == {code: status for code, status in table.items() if status != 405}
