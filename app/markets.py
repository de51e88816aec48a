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

    table = _table("ECHO2_EC2_CONFIG", settings.ec2_config)
    for name in ("security_group_ids", "instance_types"):
        if name in table:
            table[name] = tuple(table[name])
    return _made("ECHO2_EC2_CONFIG", lambda: EC2Spot(Ec2Config(**table), "ec2", on_request=on_request))


def _gcp(settings: Settings, key: str, on_request: OnRequest) -> Provider:
    from providers.gcp import Gcp, Shape, google_compute

    table = _table("ECHO2_GCP_CONFIG", settings.gcp_config)
    project, zones = table.pop("project", ""), tuple(table.pop("zones", ()))
    prices = Path(table.pop("prices_file")) if "prices_file" in table else None
    return _made(
        "ECHO2_GCP_CONFIG",
        lambda: Gcp(google_compute(project), Shape(**table), zones=zones, prices_file=prices, on_request=on_request),
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
