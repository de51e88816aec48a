"""The kinds of values that settings have: what each must look like, and how an error says so.

Invariant: no message repeats the value, which may hold a secret; a value that passes comes out in the one form in which
the rest of the code expects it.
"""

from __future__ import annotations

import base64
import binascii
import json
import os
import re
import shlex
from decimal import Decimal
from pathlib import Path
from typing import Annotated
from urllib.parse import parse_qsl, urlencode, urlsplit

from pydantic import AfterValidator, BeforeValidator, Field, SecretStr
from pydantic_settings import NoDecode

from app.protocol.errors import BadInput
from app.storage.s3 import parse_s3_url
from app.storage.stores import parse_folder_url


def _dialled(host: str) -> str:
    """A name that a resolver can be asked for. Raises ValueError."""
    try:
        host.encode("idna")
    except UnicodeError:
        raise ValueError("is not the name of a host") from None
    return host


def http_url(value: str) -> str:
    """An address of http or https, without the last slash. Raises ValueError, which never repeats the value."""
    try:
        parts = urlsplit(value)
        port = parts.port
        _dialled(parts.hostname or "")
    except ValueError:
        # The library's message can quote what stands where a password would.
        raise ValueError("is not a URL: its host or port can't be read") from None
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError("is not a URL of http or https without query")
    if parts.username is not None or parts.password is not None:
        raise ValueError("must not hold a user or password")
    if port == 0:
        raise ValueError("has a port that can't be reached")
    return value.rstrip("/")


_POSTGRES = frozenset(
    {"ssl", "host", "port", "user", "password", "database", "passfile", "service", "servicefile", "direct_tls"}
    | {"krbsrvname", "gsslib", "target_session_attrs", "command_timeout", "prepared_statement_cache_size"}
)
"""What of a URL's parameters asyncpg takes as text; of others it would raise when it connects."""


def _database_url(value: str) -> str:
    scheme, separator, rest = value.partition("://")
    scheme = {
        "postgres": "postgresql+asyncpg",
        "postgresql": "postgresql+asyncpg",
        "sqlite": "sqlite+aiosqlite",
    }.get(scheme, scheme)
    usable = bool(separator) and scheme in ("postgresql+asyncpg", "sqlite+aiosqlite")
    if not usable or (scheme.startswith("sqlite") and not rest.startswith("/")):
        raise ValueError("is not a URL of a database that we can use")
    if scheme.startswith("postgresql") and "?" in rest:
        address, _, query = rest.partition("?")
        # libpq's name for it, in most hosted databases' URLs; asyncpg calls the same thing ssl.
        names = [("ssl" if name == "sslmode" else name, text) for name, text in parse_qsl(query)]
        if not {name for name, _ in names} <= _POSTGRES:
            # It may be the end of a password, so it is not repeated.
            known = ", ".join(sorted(_POSTGRES - {"ssl"} | {"sslmode"}))
            raise ValueError(f"has a parameter after the ? that is not understood; take it out: known are {known}")
        rest = f"{address}?{urlencode(names)}"
    return _readable(f"{scheme}://{rest}")


def _readable(url: str) -> str:
    """The URL, if SQLAlchemy can read it. Raises ValueError."""
    from sqlalchemy import make_url
    from sqlalchemy.exc import ArgumentError

    try:
        port = make_url(url).port
    except (ArgumentError, ValueError):
        # Theirs quotes what stands where the port should, which may be the end of a password.
        raise ValueError(
            "can't be read: in a password, @ : / ? # and % are written as %40 %3A %2F %3F %23 %25"
        ) from None
    if port is not None and not 0 < port < 65_536:
        raise ValueError("has a port that can't be reached")
    return url


def _object_store_url(value: str) -> str:
    try:
        parse_s3_url(value) if value.startswith("s3://") else parse_folder_url(value)
    except BadInput:
        raise ValueError("is not the URL of an object store") from None
    return value


def _token(value: SecretStr) -> SecretStr:
    if not re.fullmatch(r"[!-~]+", value.get_secret_value()):
        raise ValueError("has a space, a control character or a letter outside ASCII")
    return value


def _webhook_secret(value: SecretStr) -> SecretStr:
    text = value.get_secret_value().removeprefix("whsec_").rstrip("=")
    try:
        size = len(base64.b64decode(text + "=" * (-len(text) % 4), validate=True))
    except (binascii.Error, ValueError):
        raise ValueError("is not base64") from None
    if not 24 <= size <= 64:
        raise ValueError(f"holds {size} bytes")
    return value


def _names(value: object) -> object:
    """A comma list or a JSON list, as a list."""
    if not isinstance(value, str):
        return value
    if not value.lstrip().startswith("["):
        return [name.strip() for name in value.split(",") if name.strip()]
    try:
        return json.loads(value)
    except json.JSONDecodeError:
        raise ValueError("begins like a JSON list but is none") from None


_OURS = frozenset({"ECHO2_CONTROL_URL", "ECHO2_ENGINE", "ECHO2_HF_ENDPOINT", "ECHO2_APT", "ECHO2_TUNE_NETWORK"})
"""What the service tells a machine by itself, from settings of its own."""


def _environment(value: object) -> object:
    """Words `NAME=VALUE` as a shell would read them, or a table. Raises ValueError, which never repeats a value."""
    if not isinstance(value, str):
        return value
    try:
        words = [word.partition("=") for word in shlex.split(value)]
    except ValueError:
        raise ValueError("has a quote that is not closed") from None
    if not all(sign for _, sign, _ in words):
        raise ValueError("has a word that is not NAME=VALUE")
    return {name: text for name, _, text in words}


def _for_machines(value: dict[str, str]) -> dict[str, str]:
    for name, text in value.items():
        if not re.fullmatch(r"[A-Z][A-Z0-9_]{0,63}", name) or not re.fullmatch(r"[ -~]{0,1000}", text):
            raise ValueError("has a name that is not of A-Z, 0-9 and _, or a value that is not printable ASCII")
        if name in _OURS:
            raise ValueError(f"names {name}, which the service sets itself")
        if re.search(r"TOKEN|SECRET|PASSWORD|(^|_)KEY", name):
            raise ValueError(f"names {name}: a machine's host reads its environment, so no secret may be there")
    return value


def _number(value: object) -> object:
    """What may be read as a number. Raises ValueError for a switch of the file, which Python would take for 1 or 0."""
    if isinstance(value, bool):
        raise ValueError("is true or false")
    return value


def _given(value: object) -> object:
    """A path that is one. Raises ValueError for the empty text, by which Python means the current folder."""
    if value == "":
        raise ValueError("is empty")
    return value


def _absolute(value: Path) -> Path:
    if "\0" in str(value):
        raise ValueError("has a zero byte")
    try:
        return Path(os.path.abspath(value.expanduser()))
    except RuntimeError:
        raise ValueError("names a home folder that does not exist") from None


Host = Annotated[str, Field(pattern=r"^[A-Za-z0-9.:_-]+$"), AfterValidator(_dialled)]
HttpUrl = Annotated[str, AfterValidator(http_url)]
Token = Annotated[SecretStr, AfterValidator(_token)]
Folder = Annotated[Path, BeforeValidator(_given), AfterValidator(_absolute)]
_ProviderName = Annotated[str, Field(pattern=r"^[a-z][a-z0-9_]{0,31}$")]
_TopicArn = Annotated[str, Field(pattern=r"^arn:aws[a-z-]*:sns:[a-z0-9-]+:[0-9]{12}:[A-Za-z0-9_.-]{1,256}$")]
ProviderNames = Annotated[list[_ProviderName], NoDecode, BeforeValidator(_names)]
Environment = Annotated[dict[str, str], NoDecode, BeforeValidator(_environment), AfterValidator(_for_machines)]
TopicArns = Annotated[list[_TopicArn], NoDecode, BeforeValidator(_names)]
DatabaseUrl = Annotated[str, AfterValidator(_database_url)]
ObjectStoreUrl = Annotated[str, AfterValidator(_object_store_url)]
WebhookSecret = Annotated[SecretStr, AfterValidator(_webhook_secret)]
Whole = Annotated[int, BeforeValidator(_number)]
Number = Annotated[float, BeforeValidator(_number)]
Seconds = Annotated[Number, Field(gt=0, le=86_400, allow_inf_nan=False)]
Usd = Annotated[Decimal, Field(gt=0, max_digits=15, decimal_places=6, allow_inf_nan=False)]

_WILDCARDS = {"0.0.0.0": "127.0.0.1", "": "127.0.0.1", "::": "::1"}

URL = "a URL such as https://echo2.example.org"
SECONDS = "seconds, above 0 and at most 86400"
KEY = "printable ASCII without spaces"
BOOL = "true or false"


def own_url(host: str, port: int) -> str:
    """Under which a service that listens there can be dialled from the same computer."""
    host = _WILDCARDS.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
