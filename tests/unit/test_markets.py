"""Which adapters the settings make, and what stops the start."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from app.markets import open_providers
from app.settings import Settings, SettingsError

EC2 = 'region = "us-east-1"\nimage_id = "ami-1"\ninstance_types = ["g5.xlarge"]\n'
STATIC = '[[machine]]\nname = "attic"\naddress = "192.0.2.7"\nuser = "me"\ngpu_name = "RTX 4090"\nnum_gpus = 1\n'


def opened(tmp_path: Path, **values: Any) -> dict[str, Any]:
    settings = Settings(state_dir=tmp_path / "state", **values)
    settings.state_dir.mkdir(exist_ok=True)
    return open_providers(settings, "key", lambda *_: None)


def test_each_name_makes_its_adapter(tmp_path: Path) -> None:
    ec2, static = tmp_path / "ec2.toml", tmp_path / "machines.toml"
    ec2.write_text(EC2 + 'access_key_id = "a"\nsecret_access_key = "b"\n')
    static.write_text(STATIC)
    made = opened(
        tmp_path,
        providers="marketplace,vastai,runpod,ec2,static",
        vastai_api_key="v",
        runpod_api_key="r",
        ec2_config=ec2,
        static_machines=static,
    )
    assert {name: provider.name for name, provider in made.items()} == {n: n for n in made}
    assert list(made) == ["marketplace", "vastai", "runpod", "ec2", "static"]


@pytest.mark.parametrize("name", ["vastai", "runpod", "ec2", "gcp", "static"])
def test_what_a_provider_needs_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(SettingsError, match=f"is not set, but ECHO2_PROVIDERS names {name}"):
        opened(tmp_path, providers=name)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (None, "No such file"),
        ("region = ", "is not TOML"),
        ('region = "us-east-1"', "image_id"),
        (EC2 + "colour = 1", "colour"),
        (EC2 + "reliability = 7", "reliability"),
    ],
)
def test_a_bad_file_stops_the_start_with_one_line(tmp_path: Path, text: str | None, problem: str) -> None:
    path = tmp_path / "ec2.toml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        opened(tmp_path, providers="ec2", ec2_config=path)
    assert "ECHO2_EC2_CONFIG" in caught.value.detail
    assert problem in caught.value.detail
    assert "\n" not in caught.value.detail


def test_an_unknown_provider_is_named_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no provider .azure.*marketplace"):
        opened(tmp_path, providers="azure")
