"""Makes the provider adapters that the settings name. No logic beyond reading their files.

Invariant: an adapter and its packages are imported only if it is named, and a file that can't be used stops the start
with one line that names the setting.
"""

from __future__ import annotations

import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from app.settings import Settings, SettingsError, require_providers
from providers.base import Provider, ProviderError
from providers.vastai import VastAI

OnRequest = Callable[[str, str, str], None]


def open_providers(settings: Settings, marketplace_key: str, on_request: OnRequest) -> dict[str, Provider]:
    """The adapters by name. Raises SettingsError for an unknown one, or one that its settings do not allow."""
    require_providers(settings, tuple(_MAKERS))
    return {name: _MAKERS[name](settings, marketplace_key, on_request) for name in settings.providers}


def _marketplace(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    return VastAI(
        "marketplace", settings.marketplace_url, key, interval_scale=0.0, pulls_image=False, on_request=on_request
    )


def _vastai(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    secret = settings.vastai_api_key
    return VastAI("vastai", settings.vastai_url, secret.get_secret_value() if secret else "", on_request=on_request)


def _runpod(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    from providers.runpod import RunPod

    secret = settings.runpod_api_key
    return RunPod(api_key=secret.get_secret_value() if secret else "", on_request=on_request)


def _ec2(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    from providers.ec2 import Ec2Config, EC2Spot

    setting = "ECHO2_EC2_CONFIG"
    table = _table(setting, settings.ec2_config)
    for name in ("security_group_ids", "instance_types"):
        if name in table:
            table[name] = _names(setting, table, name)
    if "types_file" in table:
        table["types_file"] = _file(setting, table, "types_file")
    return _made(setting, lambda: EC2Spot(Ec2Config(**table), "ec2", on_request=on_request))


def _gcp(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    from providers.gcp import Gcp, Shape, google_compute

    setting = "ECHO2_GCP_CONFIG"
    table = _table(setting, settings.gcp_config)
    zones, prices = _names(setting, table, "zones"), _file(setting, table, "prices_file")
    project = table.get("project")
    if not isinstance(project, str) or not project:
        raise SettingsError(f"{setting}: project is {project!r}, expected the id of a project")
    shape = {name: value for name, value in table.items() if name not in ("project", "zones", "prices_file")}
    return _made(
        setting,
        lambda: Gcp(google_compute(project), Shape(**shape), zones=zones, prices_file=prices, on_request=on_request),
    )


def _static(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    from providers.static import Static, read_machines

    path = settings.static_machines or Path()
    state = settings.state_dir / "static-machines.json"
    return _made("ECHO2_STATIC_MACHINES", lambda: Static(read_machines(path), state, on_request=on_request))


def _table(setting: str, path: Path | None) -> dict[str, Any]:
    try:
        return tomllib.loads((path or Path()).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{setting}: {str(path)!r}: {error.strerror}; expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise SettingsError(f"{setting}: {str(path)!r} is not TOML: {' '.join(str(error).split())}") from None


def _names(setting: str, table: Mapping[str, Any], key: str) -> tuple[str, ...]:
    found = table.get(key, [])
    if not isinstance(found, list) or not all(isinstance(name, str) for name in found):
        raise SettingsError(f"{setting}: {key} is {found!r}, expected a list of names")
    return tuple(found)


def _file(setting: str, table: Mapping[str, Any], key: str) -> Path | None:
    found = table.get(key)
    if found is not None and not isinstance(found, str):
        raise SettingsError(f"{setting}: {key} is {found!r}, expected a path")
    return None if found is None else Path(found)


def _made(setting: str, make: Callable[[], Provider]) -> Provider:
    """The adapter. Raises SettingsError, one line, for values that it does not take."""
    try:
        return make()
    except (ProviderError, TypeError, ValueError, OSError) as error:
        raise SettingsError(f"{setting}: {' '.join(str(error).split())}") from None


_MAKERS: Mapping[str, Callable[[Settings, str, OnRequest], Provider]] = {
    "marketplace": _marketplace,
    "vastai": _vastai,
    "runpod": _runpod,
    "ec2": _ec2,
    "gcp": _gcp,
    "static": _static,
}
