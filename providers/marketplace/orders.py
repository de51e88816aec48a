"""Reading the body of a rent request.

Invariant: pure; limits are vast.ai's documented ones, and what breaks one is refused with its name.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from decimal import Decimal, InvalidOperation
from typing import Any

from .contract import Order
from .refusals import Refused, invalid_args

_PORT = re.compile(r"^-p\s+(?:\d+:)?(\d+)(?:/tcp)?$")
MAX_PORTS = 64
MIN_DISK_GB = 8


def price_micros(value: Any) -> int:
    """Dollars per hour as micro-dollars; Refused unless 0.001 to 128."""
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise Refused(400, "invalid_price", "price must be a number of dollars per hour")
    try:
        price = Decimal(str(value))
    except InvalidOperation:
        raise Refused(400, "invalid_price", "price must be a number of dollars per hour") from None
    if not price.is_finite() or not Decimal("0.001") <= price <= 128:
        raise Refused(400, "invalid_price", "price must be 0.001 to 128 dollars per hour")
    return round(price * 1_000_000)


def _environment(raw: Any) -> tuple[dict[str, str], tuple[int, ...]]:
    if raw is None:
        return {}, ()
    if not isinstance(raw, Mapping):
        raise invalid_args("invalid env type: env must be a dict")
    env: dict[str, str] = {}
    ports: list[int] = []
    for key, value in raw.items():
        if key.startswith("-p"):
            found = _PORT.match(key)
            if found is None or not 1 <= int(found[1]) <= 65535:
                raise invalid_args(f'env: {key!r} is not a TCP port such as "-p 8000:8000"')
            ports.append(int(found[1]))
        elif not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", key):
            raise invalid_args(f"env: {key!r} is not a variable name")
        elif "\0" in str(value) or len(str(value)) > 256:
            raise invalid_args(f"env: the value of {key} is longer than 256 characters or holds a zero byte")
        else:
            env[key] = str(value)
    if len(ports) > MAX_PORTS or sum(map(len, env.values())) > 32768:
        raise invalid_args("env: more than 64 ports or 32768 characters")
    return env, tuple(dict.fromkeys(ports))


def parse_order(body: Any) -> Order:
    """Read a rent request. Raises Refused (400) naming what is wrong."""
    if not isinstance(body, Mapping):
        raise invalid_args("the body must be a JSON object")
    image, onstart, label = body.get("image"), body.get("onstart") or "", body.get("label")
    if not isinstance(image, str) or not 1 <= len(image) <= 1024:
        raise invalid_args("image must be a name of 1 to 1024 characters")
    if not isinstance(onstart, str) or len(onstart) > 4096 or "\0" in onstart:
        raise invalid_args("onstart must be text of at most 4096 characters")
    if label is not None and (not isinstance(label, str) or len(label) > 256):
        raise invalid_args("label must be text of at most 256 characters")
    disk = body.get("disk", 10)
    if isinstance(disk, bool) or not isinstance(disk, int | float) or not MIN_DISK_GB <= disk <= 100_000:
        raise invalid_args(f"disk must be {MIN_DISK_GB} GB or more")
    env, ports = _environment(body.get("env"))
    price = body.get("price")
    return Order(
        image=image, onstart=onstart, env=env, ports=ports, disk_bytes=round(disk * 10**9), label=label,
        bid_micros_h=None if price is None else price_micros(price),
        start=body.get("target_state", "running") != "stopped",
    )  # fmt: skip
