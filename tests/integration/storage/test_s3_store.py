"""The S3 store against a real HTTP service on loopback that speaks S3 (moto's server)."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import boto3
import httpx
import pytest
from moto.server import ThreadedMotoServer

from app.protocol.errors import BadInput, Forbidden, NotFound, TooLarge, Unavailable
from app.storage import s3
from app.storage.objects import ObjectInfo
from app.storage.stores import S3Store, open_store

BUCKET = "echo2-test"


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


@pytest.fixture(autouse=True)
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in [n for n in os.environ if n.startswith("AWS_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")


@pytest.fixture
def store(endpoint: str, request: pytest.FixtureRequest) -> S3Store:
    boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1").create_bucket(Bucket=BUCKET)
    store = open_store(f"s3://{BUCKET}/{request.node.originalname}/deep", endpoint_url=endpoint)
    assert isinstance(store, S3Store)
    return store


def test_an_object_lives_under_the_prefix_only(store: S3Store, endpoint: str, request: pytest.FixtureRequest) -> None:
    store.put("jobs/a/x", b"one")
    store.put("jobs/a/x", b"second")
    assert store.get("jobs/a/x") == b"second"
    assert store.head("jobs/a/x") == ObjectInfo("jobs/a/x", 6)
    assert store.get("jobs/a/x", 6) == b"second"
    with pytest.raises(TooLarge, match="6 bytes; at most 5"):
        store.get("jobs/a/x", 5)
    other = open_store(f"s3://{BUCKET}/{request.node.originalname}/other", endpoint_url=endpoint)
    assert list(other.list("")) == []
    whole = open_store(f"s3://{BUCKET}", endpoint_url=endpoint)
    assert whole.get(f"{request.node.originalname}/deep/jobs/a/x") == b"second"
    store.delete("jobs/a/x")
    store.delete("jobs/a/x")
    assert store.head("jobs/a/x") is None
    with pytest.raises(NotFound, match="jobs/a/x"):
        store.get("jobs/a/x")


def test_the_list_is_in_key_order_over_many_pages_and_without_folder_marks(
    store: S3Store, endpoint: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MOTO_S3_DEFAULT_MAX_KEYS", "7")
    names = sorted(f"many/{n}" for n in range(95, 115))
    for name in names:
        store.put(name, b"x")
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    client.put_object(Bucket=BUCKET, Key=f"{request.node.originalname}/deep/many/folder/")
    store.put("many-other", b"")
    assert [info.key for info in store.list("many/")] == names
    assert [info.key for info in store.list("many/100")] == [n for n in names if n.startswith("many/100")]


def test_a_large_file_goes_up_in_parts(
    store: S3Store, tmp_path: Path, endpoint: str, request: pytest.FixtureRequest
) -> None:
    source = tmp_path / "big"
    source.write_bytes(os.urandom(20 << 20))
    store.put_file("big", source)
    assert store.get("big") == source.read_bytes()
    client = boto3.client("s3", endpoint_url=endpoint, region_name="us-east-1")
    etag = client.head_object(Bucket=BUCKET, Key=f"{request.node.originalname}/deep/big")["ETag"]
    assert etag.strip('"').endswith("-3"), "S3 marks an object of three parts so"
    with pytest.raises(FileNotFoundError):
        store.put_file("none", tmp_path / "absent")


def test_an_object_goes_into_a_file_in_parts(store: S3Store, tmp_path: Path) -> None:
    (tmp_path / "big").write_bytes(os.urandom(20 << 20))
    store.put_file("big", tmp_path / "big")
    store.get_file("big", tmp_path / "again")
    assert (tmp_path / "again").read_bytes() == (tmp_path / "big").read_bytes()
    with pytest.raises(NotFound, match="none"):
        store.get_file("none", tmp_path / "absent")
    assert not (tmp_path / "absent").exists()


def test_presigned_urls_work_without_credentials(store: S3Store) -> None:
    put = store.presign_put("up/a b+é", 60, 1000)
    assert httpx.put(put.url, content=b"hello", headers=put.headers, timeout=10).status_code == 200
    assert store.get("up/a b+é") == b"hello"
    answer = httpx.get(store.presign_get("up/a b+é", 60), headers={"Range": "bytes=1-3"}, timeout=10)
    assert (answer.status_code, answer.content) == (206, b"ell")


@pytest.mark.parametrize("key", ["", "../x", "a//b", "/a"])
def test_an_unsafe_key_is_refused(store: S3Store, key: str) -> None:
    for call in (lambda: store.get(key), lambda: store.put(key, b""), lambda: store.presign_get(key, 60)):
        with pytest.raises(BadInput, match="not a valid object key"):
            call()


def test_lifetimes_and_sizes_that_make_no_sense_are_refused(store: S3Store) -> None:
    for seconds in (0, 7 * 24 * 3600 + 1):
        with pytest.raises(BadInput, match="seconds"):
            store.presign_get("a", seconds)
    with pytest.raises(BadInput, match="max_bytes"):
        store.presign_put("a", 60, 0)


def test_a_missing_bucket_is_not_a_missing_object(endpoint: str, tmp_path: Path) -> None:
    store = open_store("s3://no-such-bucket/p", endpoint_url=endpoint)
    (tmp_path / "f").write_bytes(b"x" * (9 << 20))
    for call in (
        lambda: store.get("a"),
        lambda: store.put("a", b""),
        lambda: list(store.list("")),
        lambda: store.put_file("a", tmp_path / "f"),
    ):
        with pytest.raises(Unavailable, match="bucket no-such-bucket does not exist"):
            call()


def test_a_service_that_is_away_is_unavailable_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(s3, "MAX_ATTEMPTS", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound, not listening: every connection is refused
        store = open_store(f"s3://{BUCKET}", endpoint_url=f"http://127.0.0.1:{taken.getsockname()[1]}")
        (tmp_path / "f").write_bytes(b"x")
        for call in (lambda: store.get("a"), lambda: store.head("a"), lambda: store.put_file("a", tmp_path / "f")):
            with pytest.raises(Unavailable, match="can't be reached"):
                call()


def test_without_credentials_it_is_forbidden(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("AWS_ACCESS_KEY_ID")
    monkeypatch.delenv("AWS_SECRET_ACCESS_KEY")
    store = open_store(f"s3://{BUCKET}", endpoint_url=endpoint)
    with pytest.raises(Forbidden, match="AWS_ACCESS_KEY_ID"):
        store.get("a")


def test_an_endpoint_that_is_no_url_is_refused() -> None:
    with pytest.raises(BadInput, match="nonsense"):
        open_store(f"s3://{BUCKET}", endpoint_url="nonsense")


@pytest.mark.parametrize(
    ("code", "status", "expected"),
    [
        ("NoSuchKey", 404, NotFound),
        ("404", 404, NotFound),
        ("AccessDenied", 403, Forbidden),
        ("403", 403, Forbidden),
        ("SomethingNew", 403, Forbidden),
        ("SignatureDoesNotMatch", 403, Forbidden),
        ("NoSuchBucket", 404, Unavailable),
        ("SlowDown", 503, Unavailable),
        ("InternalError", 500, Unavailable),
        ("", None, Unavailable),
    ],
)
def test_answers_of_s3_are_told_apart(code: str, status: int | None, expected: type[Exception]) -> None:
    from botocore.exceptions import ClientError

    response = {"Error": {"Code": code}, "ResponseMetadata": {"HTTPStatusCode": status}}
    assert type(s3.translate(ClientError(response, "GetObject"), "b", "k")) is expected  # type: ignore[arg-type]
