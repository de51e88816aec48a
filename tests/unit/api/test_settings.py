"""Settings: defaults that work as they stand, and one clear line for each value that can't be used."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from app.settings import Settings, SettingsError, load_settings, require_providers

WHSEC = "whsec_MDEyMzQ1Njc4OTAxMjM0NTY3ODkwMTIz"


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.upper().startswith("ECHO2_")]:
        monkeypatch.delenv(name)
    monkeypatch.chdir(tmp_path)


def refused(**overrides: object) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(**overrides)
    line = str(caught.value)
    assert "\n" not in line
    assert "expected" in line or "did you mean" in line
    return line


def test_the_defaults_are_the_embedded_ones(tmp_path: Path) -> None:
    settings = load_settings()
    assert (settings.host, settings.port, settings.public_url) == ("127.0.0.1", 8080, "http://127.0.0.1:8080")
    assert settings.state_dir == tmp_path / ".echo2"
    assert settings.cache_dir == tmp_path / ".echo2/cache"
    assert settings.database_url == f"sqlite+aiosqlite:///{tmp_path}/.echo2/echo2.db"
    assert settings.object_store_url == f"file://{tmp_path}/.echo2/objects"
    assert settings.providers == ["marketplace"]
    assert settings.max_upload_bytes == 64 * 1024 * 1024


def test_what_rests_on_the_state_folder_follows_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("ECHO2_STATE_DIR", "some/where else")
    monkeypatch.setenv("ECHO2_PORT", "9")
    settings = load_settings()
    assert settings.state_dir == tmp_path / "some/where else"
    assert settings.object_store_url == f"file://{tmp_path}/some/where%20else/objects"
    assert settings.public_url == "http://127.0.0.1:9"
    monkeypatch.setenv("ECHO2_STATE_DIR", "~/x")
    assert load_settings().state_dir == Path.home() / "x"


@pytest.mark.parametrize(
    ("given", "used"),
    [
        ("postgresql://u:p@h:5432/d", "postgresql+asyncpg://u:p@h:5432/d"),
        ("postgres://u:p@h/d?sslmode=require", "postgresql+asyncpg://u:p@h/d?ssl=require"),
        ("postgresql+asyncpg://h/d", "postgresql+asyncpg://h/d"),
        ("postgresql://u:p%40ss@h/d?command_timeout=5", "postgresql+asyncpg://u:p%40ss@h/d?command_timeout=5"),
        ("sqlite:////var/e.db", "sqlite+aiosqlite:////var/e.db"),
        ("sqlite+aiosqlite:////var/e.db", "sqlite+aiosqlite:////var/e.db"),
    ],
)
def test_database_urls_get_their_driver(monkeypatch: pytest.MonkeyPatch, given: str, used: str) -> None:
    monkeypatch.setenv("ECHO2_DATABASE_URL", given)
    assert load_settings().database_url == used


@pytest.mark.parametrize(
    ("text", "names"),
    [
        ("vastai", ["vastai"]),
        ("marketplace, vastai,", ["marketplace", "vastai"]),
        ('["marketplace", "vastai"]', ["marketplace", "vastai"]),
    ],
)
def test_providers_are_a_comma_list_or_a_json_list(
    monkeypatch: pytest.MonkeyPatch, text: str, names: list[str]
) -> None:
    monkeypatch.setenv("ECHO2_PROVIDERS", text)
    assert load_settings().providers == names


@pytest.mark.parametrize(
    ("host", "url"),
    [("0.0.0.0", "http://127.0.0.1:8080"), ("::", "http://[::1]:8080"), ("box.lan", "http://box.lan:8080")],
)
def test_the_public_url_can_be_dialled(monkeypatch: pytest.MonkeyPatch, host: str, url: str) -> None:
    monkeypatch.setenv("ECHO2_HOST", host)
    assert load_settings().public_url == url
    monkeypatch.setenv("ECHO2_PUBLIC_URL", "https://echo2.example.org/")
    assert load_settings().public_url == "https://echo2.example.org"


@pytest.mark.parametrize("name", ["port", "tick_seconds", "learner_processes", "bubble_bound", "max_usd_total"])
def test_a_switch_of_the_file_is_no_number(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str) -> None:
    (tmp_path / "echo2.toml").write_text(f"{name} = true\n")
    monkeypatch.setenv("ECHO2_CONFIG", "echo2.toml")
    assert refused().startswith(f"ECHO2_{name.upper()} (in ")


@pytest.mark.parametrize("name", ["state_dir", "task_dir", "priors_file"])
def test_an_empty_path_of_the_file_is_not_the_current_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str
) -> None:
    (tmp_path / "echo2.toml").write_text(f'{name} = ""\n')
    monkeypatch.setenv("ECHO2_CONFIG", "echo2.toml")
    assert refused().startswith(f"ECHO2_{name.upper()} (in ")


def test_an_empty_variable_is_an_unset_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_ADMIN_KEY", "")
    monkeypatch.setenv("ECHO2_PORT", "")
    settings = load_settings()
    assert settings.admin_key is None
    assert settings.port == 8080


BAD = [
    ("ECHO2_HOST", "a b", "address"),
    ("ECHO2_HOST", "echo2..example.org", "address"),
    ("ECHO2_PORT", "0", "1…65535"),
    ("ECHO2_PORT", "65536", "1…65535"),
    ("ECHO2_PORT", "http", "1…65535"),
    ("ECHO2_STATE_DIR", "~no-such-user-here/x", "folder"),
    ("ECHO2_DATABASE_URL", "mysql://user:hunter2@host/x", "postgresql://"),
    ("ECHO2_DATABASE_URL", "hunter2", "postgresql://"),
    ("ECHO2_DATABASE_URL", "sqlite://", "sqlite:////"),
    ("ECHO2_DATABASE_URL", "postgresql://user:p@ss:hunter2@host/x", "postgresql://"),
    ("ECHO2_DATABASE_URL", "postgresql://host:99999/x", "postgresql://"),
    ("ECHO2_DATABASE_URL", "postgresql://user:p?hunter2=x@host/x", "postgresql://"),
    ("ECHO2_DATABASE_URL", "postgresql://host/x?sslmode=require&channel_binding=require", "postgresql://"),
    ("ECHO2_OBJECT_STORE_URL", "objects", "file:///absolute/path"),
    ("ECHO2_OBJECT_STORE_URL", "file:objects", "file:///absolute/path"),
    ("ECHO2_OBJECT_STORE_URL", "s3://UPPER/x", "s3://bucket/prefix"),
    ("ECHO2_OBJECT_STORE_URL", "s3://bucket/../x", "s3://bucket/prefix"),
    ("ECHO2_S3_ENDPOINT_URL", "minio:9000", "https://"),
    ("ECHO2_PUBLIC_URL", "ftp://host", "https://"),
    ("ECHO2_PUBLIC_URL", "http://host:99999", "https://"),
    ("ECHO2_PUBLIC_URL", "http://user:hunter2", "https://"),
    ("ECHO2_PUBLIC_URL", "http://echo2..example.org", "https://"),
    ("ECHO2_VASTAI_URL", "http://user:hunter2@host", "https://"),
    ("ECHO2_MARKETPLACE_URL", "http://[", "https://"),
    ("ECHO2_ADMIN_KEY", "hunter2 hunter2", "ASCII"),
    ("ECHO2_VASTAI_API_KEY", "hunter2\nX-Evil: 1", "ASCII"),
    ("ECHO2_MARKETPLACE_API_KEY", "hunter2é", "ASCII"),
    ("ECHO2_SECRET_KEY", "hunter2 ", "ASCII"),
    ("ECHO2_WEBHOOK_SECRET", "whsec_hunter2!", "whsec_"),
    ("ECHO2_WEBHOOK_SECRET", "whsec_hunter2hunter2", "whsec_"),
    ("ECHO2_WEBHOOK_SECRET", WHSEC + "A" * 120, "whsec_"),
    ("ECHO2_NOTIFY_SECRET", "whsec_hunter2!", "whsec_"),
    ("ECHO2_NOTIFY_ALLOW_PRIVATE", "perhaps", "true or false"),
    ("ECHO2_AWS_TOPIC_ARNS", "arn:aws:sqs:us-east-2:123456789012:spot", "arn:aws:sns:"),
    ("ECHO2_MAX_USD_PER_HOUR", "0", "above 0"),
    ("ECHO2_MAX_USD_TOTAL", "NaN", "dollars"),
    ("ECHO2_MAX_USD_TOTAL", "0.0000001", "dollars"),
    ("ECHO2_MIN_CREDIT_HOURS", "-1", "0…720"),
    ("ECHO2_CHARGES_SECONDS", "0", "seconds"),
    ("ECHO2_PROVIDERS", ",", "commas"),
    ("ECHO2_PROVIDERS", "Vast AI", "commas"),
    ("ECHO2_PROVIDERS", "[1", "commas"),
    ("ECHO2_PROVIDERS", "[1]", "commas"),
    ("ECHO2_MARKETPLACE_CONTROL", "perhaps", "true or false"),
    ("ECHO2_MARKETPLACE_SPEED", "0", "above 0"),
    ("ECHO2_METRICS_ENABLED", "2", "true or false"),
    ("ECHO2_DOCS_ENABLED", "x", "true or false"),
    ("ECHO2_LOG_LEVEL", "loud", "info"),
    ("ECHO2_FLEET_ID", "a:b", "dashes"),
    ("ECHO2_TICK_SECONDS", "0", "seconds"),
    ("ECHO2_TICK_SECONDS", "nan", "seconds"),
    ("ECHO2_OFFER_REFRESH_SECONDS", "inf", "seconds"),
    ("ECHO2_RECONCILE_SECONDS", "-1", "seconds"),
    ("ECHO2_HEARTBEAT_SECONDS", "x", "seconds"),
    ("ECHO2_HEARTBEAT_TIMEOUT_SECONDS", "10", "seconds"),
    ("ECHO2_JOIN_TIMEOUT_SECONDS", "1e9", "seconds"),
    ("ECHO2_SETTLE_SECONDS", "0", "seconds"),
    ("ECHO2_MIN_LEASE_SECONDS", "-5", "seconds"),
    ("ECHO2_WIND_DOWN_SECONDS", "x", "seconds"),
    ("ECHO2_LEASE_HOURS", "0", "hours"),
    ("ECHO2_AGENT_IMAGE", "image; rm -rf /", "image"),
    ("ECHO2_AGENT_PACKAGE", " ", "pip"),
    ("ECHO2_AGENT_ENGINE", "a-b", "engine"),
    ("ECHO2_AGENT_ENGINE", "vlmm", "vllm"),
    ("ECHO2_AGENT_ENV", "NAME", "NAME=VALUE"),
    ("ECHO2_AGENT_ENV", "NAME='hunter2", "NAME=VALUE"),
    ("ECHO2_AGENT_ENV", "name=hunter2", "NAME=VALUE"),
    ("ECHO2_AGENT_ENV", "NAME='hunter2\n'", "NAME=VALUE"),
    ("ECHO2_AGENT_ENV", "HF_TOKEN=hunter2", "no secrets"),
    ("ECHO2_AGENT_ENV", "WANDB_API_KEY=hunter2", "no secrets"),
    ("ECHO2_AGENT_HF_ENDPOINT", "https://user:hunter2@mirror.example.org", "https://"),
    ("ECHO2_LEARNER_RELAY_HOST", "a/b", "address"),
    ("ECHO2_LEARNER_UPLINK_MBPS", "0", "Mbit/s"),
    ("ECHO2_MAX_UPLOAD_BYTES", "64MB", "bytes"),
]


@pytest.mark.parametrize(("name", "value", "expects"), BAD)
def test_a_bad_value_stops_with_one_line_that_names_it(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, expects: str
) -> None:
    monkeypatch.setenv(name, value)
    line = refused()
    assert line.startswith(f"{name}: ")
    assert line.count("ECHO2_") == (2 if name == "ECHO2_HEARTBEAT_TIMEOUT_SECONDS" else 1)
    assert expects in line.partition("expected")[2]
    assert "hunter2" not in line


def test_machines_get_a_further_environment_but_not_the_service_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(
        "ECHO2_AGENT_ENV", "ECHO2_VLLM_ON_SWAP=resubmit ECHO2_VLLM_ARGS='--seed 7 --swap-space 0' EMPTY="
    )
    wanted = {"ECHO2_VLLM_ON_SWAP": "resubmit", "ECHO2_VLLM_ARGS": "--seed 7 --swap-space 0", "EMPTY": ""}
    assert load_settings().agent_env == wanted
    monkeypatch.setenv("ECHO2_AGENT_ENV", "ECHO2_CONTROL_URL=http://elsewhere")
    assert "ECHO2_CONTROL_URL, which the service sets itself" in refused()


def test_every_setting_says_what_it_expects() -> None:
    assert [name for name, field in Settings.model_fields.items() if not field.description] == []


def test_several_bad_values_are_still_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_PORT", "x")
    monkeypatch.setenv("ECHO2_STATE_DIR", "~no-such-user-here")
    line = refused()
    assert "ECHO2_PORT: " in line
    assert "ECHO2_STATE_DIR: " in line
    assert "ECHO2_CACHE_DIR" not in line


def test_secrets_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_ADMIN_KEY", "hunter2")
    monkeypatch.setenv("ECHO2_VASTAI_API_KEY", "hunter2")
    monkeypatch.setenv("ECHO2_DATABASE_URL", "postgresql://u:hunter2@h/d")
    monkeypatch.setenv("ECHO2_WEBHOOK_SECRET", WHSEC)
    settings = load_settings()
    assert "hunter2" not in repr(settings) + str(settings)
    assert WHSEC not in repr(settings)
    assert settings.webhook_secret is not None
    assert settings.webhook_secret.get_secret_value() == WHSEC


def write_config(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    (tmp_path / "echo2.toml").write_text(text)
    monkeypatch.setenv("ECHO2_CONFIG", "echo2.toml")


def test_options_win_over_the_environment_and_that_over_the_file(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_config(monkeypatch, tmp_path, 'port = 1111\nhost = "filehost"\nproviders = ["vastai"]\ntick_seconds = 3\n')
    monkeypatch.setenv("ECHO2_PORT", "2222")
    settings = load_settings(tick_seconds=4)
    assert (settings.port, settings.host, settings.providers) == (2222, "filehost", ["vastai"])
    assert settings.tick_seconds == 4


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("prot = 1", ["ECHO2_CONFIG", "echo2.toml", "'prot'", "did you mean 'port'?"]),
        ("[server]\nport = 1", ["ECHO2_CONFIG", "'server'", "expected"]),
        ("port = \nhost = 1", ["ECHO2_CONFIG", "not TOML", "line 1"]),
        ("port = 'x'", ["ECHO2_PORT (in 'echo2.toml')", "1…65535"]),
        ("admin_key = 5", ["ECHO2_ADMIN_KEY (in 'echo2.toml')"]),
    ],
)
def test_a_file_that_cannot_be_used_is_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, parts: list[str]
) -> None:
    write_config(monkeypatch, tmp_path, text)
    line = refused()
    for part in parts:
        assert part in line


def test_a_file_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_CONFIG", "absent.toml")
    assert refused() == "ECHO2_CONFIG: 'absent.toml': No such file or directory; expected a TOML file"


def test_an_unknown_option_is_refused() -> None:
    with pytest.raises(SettingsError, match="ECHO2_PROT: there is no such setting"):
        load_settings(prot=1)


def test_providers_are_held_against_those_that_exist(monkeypatch: pytest.MonkeyPatch) -> None:
    known = ("marketplace", "vastai")
    require_providers(load_settings(), known)
    with pytest.raises(SettingsError, match=r"^ECHO2_PROVIDERS: there is no provider 'vastia'; expected some of "):
        require_providers(load_settings(providers="marketplace,vastia"), known)
    with pytest.raises(SettingsError, match=r"^ECHO2_VASTAI_API_KEY: is not set"):
        require_providers(load_settings(providers="vastai"), known)
    require_providers(load_settings(providers="vastai", vastai_api_key="k"), known)
