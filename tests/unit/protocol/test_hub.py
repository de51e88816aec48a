"""A place on the Hub is a repository at a commit, or it is refused."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from app.protocol.hub import HubRef
from app.protocol.learner import AssetInfo
from app.protocol.node import AssetRef

SHA = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("repo", "revision", "wrong"),
    [
        ("Qwen/Qwen3-0.6B", SHA, None),
        ("a/b", SHA, None),
        ("a/b", "main", "revision"),
        ("a/b", "v1.0", "revision"),
        ("a/b", SHA[:-1], "revision"),
        ("a/b", SHA.upper(), "revision"),
        ("a/b", SHA + "\n", "revision"),
        ("a/b", f"{SHA}/../main", "revision"),
        ("gpt2", SHA, "repo"),
        ("a/b/c", SHA, "repo"),
        ("a/../b", SHA, "repo"),
        ("../b", SHA, "repo"),
        ("a/b?x=1", SHA, "repo"),
        ("https://hub/a/b", SHA, "repo"),
        ("a/" + "b" * 97, SHA, "repo"),
    ],
)
def test_only_a_repository_at_a_commit(repo: str, revision: str, wrong: str | None) -> None:
    told = {"path": "m.safetensors", "size": 1, "blake3": "0" * 64, "hub": {"repo": repo, "revision": revision}}
    if wrong is None:
        ref = HubRef(repo=repo, revision=revision)
        assert AssetInfo.model_validate(told).hub == AssetRef.model_validate({**told, "url": ""}).hub == ref
        return
    for read in (AssetInfo.model_validate, lambda t: AssetRef.model_validate({**t, "url": ""})):
        with pytest.raises(ValidationError) as raised:
            read(told)
        assert [e["loc"] for e in raised.value.errors()] == [("hub", wrong)]
