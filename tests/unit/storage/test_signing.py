"""Signed URLs of the folder store: only what was granted, for as long as it was granted."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from urllib.parse import parse_qsl, unquote, urlsplit

import pytest

from app.protocol.errors import BadInput, EchoError, Forbidden, Gone, TooLarge, Unavailable
from app.storage.stores import FolderStore, Grant, check_signature

KEY = b"0123456789abcdef0123456789abcdef"
NOW = 1_000_000.5


@pytest.fixture
def store(tmp_path: Path) -> FolderStore:
    return FolderStore(tmp_path, public_url="http://host:8080/base/", signing_key=KEY, clock=lambda: NOW)


def parse(url: str) -> tuple[str, dict[str, str]]:
    parts = urlsplit(url)
    assert parts.path.startswith("/base/v1/objects/")
    return unquote(parts.path.removeprefix("/base/v1/objects/")), dict(parse_qsl(parts.query))


def test_a_url_is_good_for_what_it_was_signed_for(store: FolderStore) -> None:
    key, query = parse(store.presign_get("jobs/a b/é?#%.bin", 60))
    assert key == "jobs/a b/é?#%.bin"
    assert query.keys() == {"expires", "method", "signature"}
    granted = Grant(key, "GET", 1_000_060, None)
    assert check_signature(KEY, key, query, method="GET", now=NOW) == granted
    assert check_signature(KEY, key, query, method="HEAD", now=NOW + 59) == granted

    put = store.presign_put("up", 60, 100)
    assert put.headers == {}
    key, query = parse(put.url)
    for size in (None, 0, 100):
        assert check_signature(KEY, key, query, method="PUT", now=NOW, size=size) == Grant("up", "PUT", 1_000_060, 100)


def test_the_url_reads_as_documented(store: FolderStore) -> None:
    url = store.presign_put("a/b", 60, 100).url
    assert url.startswith("http://host:8080/base/v1/objects/a/b?expires=1000060&method=PUT&max_bytes=100&signature=")


Change = Callable[[dict[str, str]], object]
TAMPERED: dict[str, Change] = {
    "later": lambda q: q.update(expires=str(int(q["expires"]) + 1)),
    "larger": lambda q: q.update(max_bytes="101"),
    "unlimited": lambda q: q.pop("max_bytes"),
    "other method": lambda q: (q.update(method="GET"), q.pop("max_bytes")),
    "limit of a GET": lambda q: q.update(method="GET"),
    "unknown method": lambda q: q.update(method="DELETE"),
    "one digit": lambda q: q.update(signature=("0" if q["signature"][0] != "0" else "1") + q["signature"][1:]),
    "capitals": lambda q: q.update(signature=q["signature"].upper() + "A"),
    "short": lambda q: q.update(signature=q["signature"][:-1]),
    "none": lambda q: q.pop("signature"),
    "not ASCII": lambda q: q.update(signature="é" * 64),
    "no time": lambda q: q.pop("expires"),
    "negative time": lambda q: q.update(expires="-1"),
    "other digits": lambda q: q.update(expires="١"),
}


@pytest.mark.parametrize("name", list(TAMPERED))
def test_a_changed_url_is_forbidden(store: FolderStore, name: str) -> None:
    key, query = parse(store.presign_put("up", 60, 100).url)
    TAMPERED[name](query)
    method = query.get("method", "PUT")
    with pytest.raises(Forbidden):
        check_signature(KEY, key, query, method=method, now=NOW)


def test_a_url_for_one_object_opens_no_other(store: FolderStore) -> None:
    _, query = parse(store.presign_get("a/b", 60))
    with pytest.raises(Forbidden):
        check_signature(KEY, "a/c", query, method="GET", now=NOW)
    with pytest.raises(BadInput):
        check_signature(KEY, "../a/b", query, method="GET", now=NOW)


def test_an_object_name_cannot_imitate_another_field(store: FolderStore) -> None:
    key, query = parse(store.presign_put("x", 60, 5).url)
    # Written after each other, the limit and the name of "5" + "x" and "" + "5\nx" would be the same text.
    with pytest.raises(Forbidden):
        check_signature(KEY, f"5\n{key}", query | {"method": "GET"}, method="GET", now=NOW)


def test_another_services_key_is_forbidden(store: FolderStore) -> None:
    key, query = parse(store.presign_get("a", 60))
    with pytest.raises(Forbidden):
        check_signature(b"another key", key, query, method="GET", now=NOW)


@pytest.mark.parametrize(("request_method"), ["PUT", "DELETE", "POST", "PATCH"])
def test_a_url_to_read_does_nothing_else(store: FolderStore, request_method: str) -> None:
    key, query = parse(store.presign_get("a", 60))
    with pytest.raises(Forbidden, match="signed for GET"):
        check_signature(KEY, key, query, method=request_method, now=NOW)


@pytest.mark.parametrize(("later", "error"), [(59.4, None), (59.5, Gone), (1e6, Gone)])
def test_a_url_expires(store: FolderStore, later: float, error: type[EchoError] | None) -> None:
    key, query = parse(store.presign_get("a", 60))
    if error is None:
        check_signature(KEY, key, query, method="GET", now=NOW + later)
    else:
        with pytest.raises(error, match="expired"):
            check_signature(KEY, key, query, method="GET", now=NOW + later)


def test_an_expired_url_with_a_wrong_signature_is_forbidden_not_gone(store: FolderStore) -> None:
    key, query = parse(store.presign_get("a", 60))
    with pytest.raises(Forbidden):
        check_signature(KEY, key, query | {"signature": "0" * 64}, method="GET", now=NOW + 1e6)


def test_a_body_over_the_limit_is_too_large(store: FolderStore) -> None:
    key, query = parse(store.presign_put("up", 60, 100).url)
    with pytest.raises(TooLarge, match="101 bytes"):
        check_signature(KEY, key, query, method="PUT", now=NOW, size=101)


@pytest.mark.parametrize(("url", "key"), [(None, KEY), ("http://x", None), (None, None), ("http://x", b"")])
def test_a_store_without_key_or_address_says_that_it_cannot_presign(
    tmp_path: Path, url: str | None, key: bytes | None
) -> None:
    store = FolderStore(tmp_path, public_url=url, signing_key=key)
    with pytest.raises(Unavailable, match="public_url and signing_key"):
        store.presign_get("a", 60)
    with pytest.raises(Unavailable, match="public_url and signing_key"):
        store.presign_put("a", 60, 1)


def test_lifetimes_sizes_and_names_that_make_no_sense_are_refused(store: FolderStore) -> None:
    for seconds in (0, -1, 7 * 24 * 3600 + 1):
        with pytest.raises(BadInput, match="seconds"):
            store.presign_get("a", seconds)
    with pytest.raises(BadInput, match="max_bytes"):
        store.presign_put("a", 60, 0)
    with pytest.raises(BadInput):
        store.presign_get("../a", 60)
