"""The object store on an S3-compatible service, through boto3.

Invariant: no call waits or retries without end, and no error of boto3 leaves this module. boto3 is imported when a
store is opened: a rented node reads and writes through presigned URLs and does not have it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from app.protocol.errors import BadInput, EchoError, Forbidden, NotFound, Unavailable
from app.storage.objects import CHECK_KEY, ObjectInfo, PresignedPut, at_most, validate_key

if TYPE_CHECKING:
    from mypy_boto3_s3 import S3Client

CONNECT_TIMEOUT_S = 5
READ_TIMEOUT_S = 60
MAX_ATTEMPTS = 5
CHECK_TIMEOUT_S = 3
"""To connect, and to be answered, in a check: it says how things stand now and tries nothing again."""
MAX_EXPIRES_S = 7 * 24 * 3600
"""S3's own limit on a presigned URL."""

NOT_A_STORE = "{!r} is not an object store; expected file:///absolute/path or s3://bucket/prefix"

_BUCKET = re.compile(r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]")
_MISSING = frozenset({"404", "NoSuchKey", "NotFound"})
_DENIED = frozenset(
    {"401", "403", "AccessDenied", "InvalidAccessKeyId", "SignatureDoesNotMatch", "ExpiredToken", "InvalidToken"}
)


def parse_s3_url(url: str) -> tuple[str, str]:
    """Bucket and prefix (without slashes at its ends) of `s3://bucket/prefix`. Raises BadInput."""
    try:
        parts = urlsplit(url)
        prefix = parts.path.strip("/")
        if prefix:
            validate_key(prefix)
    except (ValueError, BadInput) as error:
        raise BadInput(NOT_A_STORE.format(url)) from error
    if parts.scheme != "s3" or parts.query or parts.fragment or not _BUCKET.fullmatch(parts.netloc):
        raise BadInput(NOT_A_STORE.format(url))
    return parts.netloc, prefix


def check_expires(expires_s: int) -> int:
    """The lifetime of a presigned URL if it is 1 second … 7 days. Raises BadInput."""
    if not 1 <= expires_s <= MAX_EXPIRES_S:
        raise BadInput(f"a URL can be valid for 1…{MAX_EXPIRES_S} seconds, not {expires_s}")
    return expires_s


class S3Store:
    """Objects under `s3://bucket/prefix`.

    Credentials and region come from the usual AWS places (environment, profile, instance role). `endpoint_url` names a
    service other than AWS (MinIO, R2, …), which is then addressed by path. An upload that dies in the middle of a
    multipart transfer shows nothing under its key; a lifecycle rule of the bucket removes such parts.
    """

    def __init__(self, bucket: str, prefix: str = "", *, endpoint_url: str | None = None) -> None:
        self._bucket = bucket
        self._prefix = f"{prefix}/" if prefix else ""
        self._endpoint_url = endpoint_url
        self._client = _client(endpoint_url)
        self._checker: S3Client | None = None
        self._written = False
        """Whether the last check went well: then the next one only reads."""

    def __repr__(self) -> str:
        return f"S3Store(s3://{self._bucket}/{self._prefix})"

    def check(self) -> None:
        """As the protocol says. One at a time."""
        written, self._written = self._written, False
        try:
            if not (written and self._check_is_there()):
                with _mapped(self._bucket, CHECK_KEY):
                    self._quick.put_object(Bucket=self._bucket, Key=self._full(CHECK_KEY), Body=b"")
        except Forbidden as error:
            raise Forbidden(f"AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY: {error.detail}") from error
        except Unavailable as error:
            names = "ECHO2_OBJECT_STORE_URL" + (", ECHO2_S3_ENDPOINT_URL" if self._endpoint_url else "")
            raise Unavailable(f"{names}: {error.detail}") from error
        self._written = True

    @property
    def _quick(self) -> S3Client:
        if self._checker is None:
            self._checker = _client(self._endpoint_url, connect_s=CHECK_TIMEOUT_S, read_s=CHECK_TIMEOUT_S, attempts=1)
        return self._checker

    def _check_is_there(self) -> bool:
        try:
            with _mapped(self._bucket, CHECK_KEY):
                answer = self._quick.get_object(Bucket=self._bucket, Key=self._full(CHECK_KEY))
                answer["Body"].close()
        except NotFound:
            return False
        return True

    def put(self, key: str, data: bytes) -> None:
        """Store bytes in one request. Raises Unavailable, Forbidden."""
        with _mapped(self._bucket, key):
            self._client.put_object(Bucket=self._bucket, Key=self._full(key), Body=data)

    def put_file(self, key: str, path: Path) -> None:
        """Store a file; boto3 sends files over 8 MiB in parts. Raises Unavailable, Forbidden."""
        with _mapped(self._bucket, key):
            self._client.upload_file(str(path), self._bucket, self._full(key))

    def get(self, key: str, most: int | None = None) -> bytes:
        """All bytes of an object. Raises NotFound, Unavailable, Forbidden; TooLarge if it has more than `most`, which
        are not fetched."""
        with _mapped(self._bucket, key):
            answer = self._client.get_object(Bucket=self._bucket, Key=self._full(key))
            with closing(answer["Body"]) as body:
                at_most(key, answer["ContentLength"], most)
                return body.read()

    def get_file(self, key: str, path: Path) -> None:
        """Put an object into a file; boto3 fetches large ones in parts. Raises as `get`; OSError if the file can't be
        written."""
        with _mapped(self._bucket, key):
            self._client.download_file(self._bucket, self._full(key), str(path))

    def head(self, key: str) -> ObjectInfo | None:
        """Size, or None if there is no such object. Raises Unavailable, Forbidden."""
        try:
            with _mapped(self._bucket, key):
                answer = self._client.head_object(Bucket=self._bucket, Key=self._full(key))
        except NotFound:
            return None
        return ObjectInfo(key, answer["ContentLength"])

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order, fetched page by page as they are consumed."""
        with _mapped(self._bucket, prefix):
            pages = self._client.get_paginator("list_objects_v2").paginate(
                Bucket=self._bucket, Prefix=self._prefix + prefix
            )
            for page in pages:
                for item in page.get("Contents", []):
                    # Consoles mark "folders" with empty objects; they are nobody's data.
                    if not item["Key"].endswith("/"):
                        yield ObjectInfo(item["Key"][len(self._prefix) :], item["Size"])

    def delete(self, key: str) -> None:
        """Remove; absent is fine. Raises Unavailable, Forbidden."""
        with _mapped(self._bucket, key):
            self._client.delete_object(Bucket=self._bucket, Key=self._full(key))

    def presign_get(self, key: str, expires_s: int) -> str:
        """URL that lets anyone GET this object for `expires_s` seconds (at most 7 days)."""
        return self._presign("get_object", key, expires_s)

    def presign_put(self, key: str, expires_s: int, max_bytes: int) -> PresignedPut:
        """URL that lets anyone PUT this object for `expires_s` seconds (at most 7 days).

        S3 can't limit the size of a PUT that it has not yet seen, so `max_bytes` is not part of the URL: whoever
        accepts the object asks `head` for its size first.
        """
        if max_bytes < 1:
            raise BadInput(f"max_bytes must be at least 1, not {max_bytes}")
        return PresignedPut(self._presign("put_object", key, expires_s), {})

    def _presign(self, call: str, key: str, expires_s: int) -> str:
        params = {"Bucket": self._bucket, "Key": self._full(key)}
        with _mapped(self._bucket, key):
            return self._client.generate_presigned_url(call, Params=params, ExpiresIn=check_expires(expires_s))

    def _full(self, key: str) -> str:
        return self._prefix + validate_key(key)


def _client(
    endpoint_url: str | None,
    *,
    connect_s: float = CONNECT_TIMEOUT_S,
    read_s: float = READ_TIMEOUT_S,
    attempts: int = MAX_ATTEMPTS,
) -> S3Client:
    try:
        import boto3
        from botocore.config import Config
        from botocore.exceptions import BotoCoreError
    except ImportError as error:
        raise BadInput("an s3:// object store needs boto3: pip install 'echo2[control]'") from error
    config = Config(
        connect_timeout=connect_s,
        read_timeout=read_s,
        retries={"total_max_attempts": attempts, "mode": "standard"},
        signature_version="s3v4",
        s3={"addressing_style": "path" if endpoint_url else "auto"},
        # Many S3-compatible services don't know AWS's newer trailing checksums.
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        max_pool_connections=32,
    )
    try:
        session = boto3.session.Session()
        region = session.region_name or "us-east-1"
        return session.client("s3", endpoint_url=endpoint_url, region_name=region, config=config)
    except (BotoCoreError, ValueError) as error:
        raise BadInput(f"the S3 client can't be set up: {error}") from error


@contextmanager
def _mapped(bucket: str, key: str) -> Iterator[None]:
    """Errors of boto3 as ours."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError

    try:
        yield
    except NoCredentialsError as error:
        raise Forbidden(f"no S3 credentials for bucket {bucket}: set AWS_ACCESS_KEY_ID and its secret") from error
    except ClientError as error:
        raise translate(error, bucket, key) from error
    except Boto3Error as error:
        # The transfer manager wraps the answer of the service in an error of its own.
        cause = error.__context__
        raise (translate(cause, bucket, key) if isinstance(cause, ClientError) else _away(bucket, error)) from error
    except BotoCoreError as error:
        raise _away(bucket, error) from error


def translate(error: object, bucket: str, key: str) -> EchoError:
    """An answer of S3 (a ClientError) as NotFound, Forbidden or Unavailable."""
    response = getattr(error, "response", {})
    code = str(response.get("Error", {}).get("Code", ""))
    status = response.get("ResponseMetadata", {}).get("HTTPStatusCode")
    if code in _MISSING:
        return NotFound(f"there is no object {key}")
    if code == "NoSuchBucket":
        return Unavailable(f"bucket {bucket} does not exist: create it, or name another as object store")
    if code in _DENIED or status in (401, 403):
        return Forbidden(f"bucket {bucket} refuses our credentials ({code or status})")
    return Unavailable(f"the object store answered {code or 'an error'} (HTTP {status})")


def _away(bucket: str, error: Exception) -> Unavailable:
    return Unavailable(f"the object store of bucket {bucket} can't be reached: {type(error).__name__}")
