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
        (EC2 + "security_group_ids = 5", "security_group_ids is 5, expected a list of names"),
        (EC2 + 'security_group_ids = "sg-1"', "security_group_ids is 'sg-1', expected a list of names"),
        (EC2 + "types_file = 5", "types_file is 5, expected a path"),
        (EC2 + 'types_file = "/nowhere/types.toml"', "/nowhere/types.toml"),
        (EC2.replace("us-east-1", "us east"), "us east"),
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


def test_ec2_reads_its_types_from_the_file_that_is_named(tmp_path: Path) -> None:
    types, config = tmp_path / "types.toml", tmp_path / "ec2.toml"
    types.write_text(
        '["x9.large"]\ngpu_name = "L4"\nnum_gpus = 1\ngpu_ram_mb = 23034\nvcpus = 4\nnetwork_gbit_s = 10\n'
    )
    own = EC2.replace("g5.xlarge", "x9.large")
    config.write_text(f'{own}types_file = "{types}"\n')
    assert list(opened(tmp_path, providers="ec2", ec2_config=config)) == ["ec2"]
    config.write_text(own)
    with pytest.raises(SettingsError, match=r"instance type x9\.large is not in"):
        opened(tmp_path, providers="ec2", ec2_config=config)


def test_a_profile_of_boto3_that_is_not_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_PROFILE", "nobody")
    path = tmp_path / "ec2.toml"
    path.write_text(EC2)
    with pytest.raises(SettingsError, match=r"^ECHO2_EC2_CONFIG: .*profile \(nobody\)"):
        opened(tmp_path, providers="ec2", ec2_config=path)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ('boot_image = "b"', "project is None, expected the id of a project"),
        ('project = "p"\nzones = 5', "zones is 5, expected a list of names"),
        ('project = "p"\nzones = "us-central1-a"', "zones is 'us-central1-a', expected a list of names"),
        ('project = "p"\nprices_file = 5', "prices_file is 5, expected a path"),
    ],
)
def test_a_bad_file_for_google_stops_the_start_with_one_line(tmp_path: Path, text: str, problem: str) -> None:
    path = tmp_path / "gcp.toml"
    path.write_text(text)
    with pytest.raises(SettingsError) as caught:
        opened(tmp_path, providers="gcp", gcp_config=path)
    assert caught.value.detail == f"ECHO2_GCP_CONFIG: {problem}"


def test_an_unknown_provider_is_named_with_the_known(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no provider .azure.*marketplace"):
        opened(tmp_path, providers="azure")
