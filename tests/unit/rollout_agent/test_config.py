from __future__ import annotations

import pytest

from app.protocol.errors import BadInput
from app.rollout_agent.config import AgentSettings, RelayAddress, load_settings, relay_address, self_destruct
from app.rollout_agent.engines.registry import make_engine


@pytest.fixture(autouse=True)
def _clean(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_CONTROL_URL", "http://control:8080/")
    monkeypatch.setenv("ECHO2_JOIN_TOKEN", "s3cret")
    for name in ("ENGINE", "RELAY_PORT", "AGENT_DIR", "DEVICE", "SIM_TOKENS_PER_S", "ORPHAN_TIMEOUT_S", "THREADS"):
        monkeypatch.delenv(f"ECHO2_{name}", raising=False)


def test_settings_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ECHO2_SIM_TOKENS_PER_S", "120.5")
    settings = load_settings()
    assert settings.control_url == "http://control:8080"
    assert settings.join_token.get_secret_value() == "s3cret"
    assert settings.sim_tokens_per_s == 120.5
    assert settings.relay_port == 7070
    assert settings.orphan_timeout_s == 900


def test_no_repr_shows_the_token() -> None:
    assert "s3cret" not in repr(load_settings())


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("ECHO2_CONTROL_URL", "control:8080"),
        ("ECHO2_HF_ENDPOINT", "hf-mirror.example.org"),
        ("ECHO2_HF_ENDPOINT", "https://s3cret@hf-mirror.example.org"),
        ("ECHO2_HF_ENDPOINT", "https://hf-mirror.example.org/?key=s3cret"),
        ("ECHO2_RELAY_PORT", "70000"),
        ("ECHO2_DEVICE", "tpu"),
        ("ECHO2_SIM_TOKENS_PER_S", "0"),
        ("ECHO2_THREADS", "many"),
        ("ECHO2_VLLM_ON_SWAP", "drop"),
        ("ECHO2_VLLM_MEMORY_SHARE", "1.5"),
        ("ECHO2_VLLM_MAX_SEQUENCES", "0"),
        ("ECHO2_VLLM_ARGS", "--seed '7"),
        ("ECHO2_VLLM_ARGS", "--seed 7 --host 0.0.0.0"),
        ("ECHO2_VLLM_ARGS", "--hos=0.0.0.0"),
        ("ECHO2_VLLM_ARGS", "--api_key s3cret"),
        ("ECHO2_VLLM_ARGS", "--logprobs-mode raw_logprobs"),
        ("ECHO2_VLLM_ARGS", "--generation-config auto"),
        ("ECHO2_VLLM_ARGS", "--config /tmp/s3cret.yaml"),
        ("ECHO2_VLLM_ARGS", "--served-model-name other"),
    ],
)
def test_a_bad_value_is_named(name: str, value: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(name, value)
    with pytest.raises(BadInput, match=name) as caught:
        load_settings()
    assert "\n" not in caught.value.detail
    assert "s3cret" not in caught.value.detail


def test_other_arguments_of_the_engine_are_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    words = "--max-model-len 4096 --enable-prefix-caching -tp 2 --seed 7 --max-loras=3 --gpu_memory_utilization 0.5"
    monkeypatch.setenv("ECHO2_VLLM_ARGS", words)
    assert load_settings().vllm_args == words


def test_a_missing_token_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ECHO2_JOIN_TOKEN")
    with pytest.raises(BadInput, match="ECHO2_JOIN_TOKEN"):
        load_settings()


PUBLIC = {"PUBLIC_IPADDR": "203.0.113.7", "VAST_TCP_PORT_7070": "41234"}


@pytest.mark.parametrize(
    ("env", "expected"),
    [
        ({}, RelayAddress("0.0.0.0", 7070, None)),
        (PUBLIC, RelayAddress("0.0.0.0", 7070, "http://203.0.113.7:41234")),
        ({"PUBLIC_IPADDR": "203.0.113.7"}, RelayAddress("0.0.0.0", 7070, None)),
        ({"VAST_TCP_PORT_7070": "41234"}, RelayAddress("0.0.0.0", 7070, None)),
        ({**PUBLIC, "ECHO2_BIND_7070": "9001"}, RelayAddress("127.0.0.1", 9001, "http://203.0.113.7:41234")),
        ({"ECHO2_BIND_7071": "9001"}, RelayAddress("0.0.0.0", 7070, None)),
        ({**PUBLIC, "PUBLIC_IPADDR": "2001:db8::1"}, RelayAddress("0.0.0.0", 7070, "http://[2001:db8::1]:41234")),
    ],
)
def test_the_relay_address_follows_the_marketplace(env: dict[str, str], expected: RelayAddress) -> None:
    assert relay_address(7070, env) == expected


@pytest.mark.parametrize("env", [{**PUBLIC, "VAST_TCP_PORT_7070": "http"}, {"ECHO2_BIND_7070": "0"}])
def test_a_port_that_is_none_is_refused(env: dict[str, str]) -> None:
    with pytest.raises(BadInput, match="port number"):
        relay_address(7070, env)


def test_self_destruct_needs_all_three_and_hides_its_key() -> None:
    env = {"ECHO2_VAST_URL": "https://vast.example/", "CONTAINER_ID": "12", "CONTAINER_API_KEY": "k3y"}
    found = self_destruct(env)
    assert found is not None
    assert (found.url, found.instance, found.key) == ("https://vast.example", "12", "k3y")
    assert "k3y" not in repr(found)
    assert self_destruct({**env, "ECHO2_VAST_URL": "", "VAST_URL": "http://market"}) is not None
    for name in env:
        assert self_destruct({k: v for k, v in env.items() if k != name}) is None


def test_an_unknown_engine_is_answered_with_the_known_ones() -> None:
    settings = AgentSettings.model_validate({"control_url": "http://c", "join_token": "t", "engine": "magic"})
    with pytest.raises(BadInput, match=r"magic.*transformers"):
        make_engine(settings)
