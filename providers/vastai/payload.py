"""What we send to vast.ai.

Invariant: pure; vast.ai's limits are checked here, so that a request that it would misread is never sent. Fields
that would be null are left out: a null price means "on demand".
"""

from __future__ import annotations

from typing import Any

from providers.base import BadRequest, Billing, CapabilityError, Offer, OfferQuery, RentSpec

from .parse import dollars

MIN_DISK_GB = 8
MAX_ONSTART = 4096
MAX_ENV_VALUE = 256
MAX_ENV = 32_768
MAX_LABEL = 256
MAX_IMAGE = 1024
MAX_PORTS = 64
MIN_BID, MAX_BID_PER_GPU, MAX_BID = 1_000, 32_000_000, 128_000_000
_TYPES = {Billing.ON_DEMAND: "on-demand", Billing.SPOT_BID: "bid"}


def search_type(billing: Billing) -> str:
    """vast.ai's word. CapabilityError for what it does not sell."""
    if billing not in _TYPES:
        raise CapabilityError(f"vast.ai has no {billing.value} machines: use on_demand or spot_bid")
    return _TYPES[billing]


def search_body(query: OfferQuery, verified_only: bool) -> dict[str, Any]:
    """The search. Filters on names are pushed down with spaces, as vast.ai writes them."""
    body: dict[str, Any] = {"rentable": {"eq": True}, "rented": {"eq": False}, "external": {"eq": False}}
    if verified_only:
        body["verified"] = {"eq": True}
    if query.gpu_names:
        body["gpu_name"] = {"in": [name.replace("_", " ") for name in query.gpu_names]}
    if query.min_reliability > 0:
        body["reliability"] = {"gte": query.min_reliability}
    if query.min_duration_s > 0:
        body["duration"] = {"gte": query.min_duration_s}
    if query.min_ports > 0:
        body["direct_port_count"] = {"gte": query.min_ports}
    return {
        **body, "order": [["dph_total", "asc"]], "type": search_type(query.billing), "limit": query.limit,
        "allocated_storage": query.disk_gb,
    }  # fmt: skip


def check_bid(bid_micros_h: int, num_gpus: int) -> None:
    """BadRequest unless vast.ai takes the bid."""
    highest = min(MAX_BID, MAX_BID_PER_GPU * num_gpus)
    if not MIN_BID <= bid_micros_h <= highest:
        raise BadRequest(f"a bid of {bid_micros_h} micro-dollars/h is outside {MIN_BID}..{highest}: change the bid")


def _check(offer: Offer, spec: RentSpec) -> None:
    if offer.billing not in _TYPES:
        raise CapabilityError(f"vast.ai has no {offer.billing.value} machines: use on_demand or spot_bid")
    if offer.billing is Billing.SPOT_BID and spec.bid_micros_h is None:
        raise BadRequest("an interruptible rent without a bid would be billed on demand: set bid_micros_h")
    if offer.billing is Billing.ON_DEMAND and spec.bid_micros_h is not None:
        raise BadRequest("an on-demand rent with a bid would be interruptible: leave bid_micros_h out")
    if spec.bid_micros_h is not None:
        check_bid(spec.bid_micros_h, offer.num_gpus)
    sizes = (
        ("label", len(spec.label), 1, MAX_LABEL), ("image", len(spec.image), 1, MAX_IMAGE),
        ("onstart", len(spec.onstart), 0, MAX_ONSTART), ("number of ports", len(spec.ports), 0, MAX_PORTS),
        ("env in all", sum(len(k) + len(v) for k, v in spec.env.items()), 0, MAX_ENV),
        *((f"value of env {name}", len(value), 0, MAX_ENV_VALUE) for name, value in spec.env.items()),
    )  # fmt: skip
    for what, size, least, most in sizes:
        if not least <= size <= most:
            raise BadRequest(f"{what} has size {size}, vast.ai takes {least} to {most}")
    if spec.disk_gb < MIN_DISK_GB:
        raise BadRequest(f"disk_gb is {spec.disk_gb}, vast.ai takes {MIN_DISK_GB} or more")


def create_body(offer: Offer, spec: RentSpec) -> dict[str, Any]:
    """The rent request. BadRequest or CapabilityError when vast.ai would refuse or misread it."""
    _check(offer, spec)
    body: dict[str, Any] = {
        "client_id": "me", "image": spec.image, "disk": float(spec.disk_gb), "label": spec.label,
        "env": {**spec.env, **{f"-p {port}:{port}": "1" for port in spec.ports}}, "onstart": spec.onstart,
        "runtype": "ssh_direct", "cancel_unavail": True, "target_state": "running",
    }  # fmt: skip
    if spec.bid_micros_h is not None:
        body["price"] = dollars(spec.bid_micros_h)
    return body
