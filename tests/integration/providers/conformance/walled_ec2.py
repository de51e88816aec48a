"""A client of EC2 that adds what moto has not: capacity, idempotency tokens, prices, lag, interruptions, bad keys.

Invariant: what no order concerns goes to moto unchanged; each order is used up once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

from botocore.exceptions import ClientError, ConnectionClosedError, ReadTimeoutError

from providers.ec2.clients import Ec2Api

ZONES = ("us-east-1a", "us-east-1b")
PRICES = {"g5.xlarge": "0.4310", "g6e.xlarge": "0.8120", "g6.12xlarge": "2.1000", "x9.large": "0.3000"}
Answer = dict[str, Any]


def client_error(call: str, code: str, status: int, message: str = "no") -> ClientError:
    """What boto3 raises for a refusal of EC2."""
    return ClientError(
        {"Error": {"Code": code, "Message": message}, "ResponseMetadata": {"HTTPStatusCode": status}},  # type: ignore[typeddict-item]
        call,
    )


@dataclass
class Wall:
    """What goes wrong on the way, and what passed. Shared by all adapters of a harness."""

    calls: int = 0
    creates: list[Answer] = field(default_factory=list)
    create_faults: list[str] = field(default_factory=list)
    release_faults: int = 0
    list_faults: list[str] = field(default_factory=list)
    search_faults: list[str] = field(default_factory=list)
    ignore_filters: bool = False
    visible: set[str] | None = None
    taken: set[str] = field(default_factory=set)
    by_token: dict[str, tuple[Answer, Answer]] = field(default_factory=dict)


class WalledEc2:
    """An EC2 client with faults."""

    def __init__(self, inner: Ec2Api, wall: Wall, *, denied: bool = False) -> None:
        self._inner = inner
        self._wall = wall
        self._denied = denied

    def _arrive(self, call: str) -> None:
        self._wall.calls += 1
        if self._denied:
            raise client_error(call, "AuthFailure", 401, "AWS was not able to validate the provided access credentials")

    def run_instances(self, **kwargs: Any) -> Answer:
        self._arrive("RunInstances")
        self._wall.creates.append(kwargs)
        fault = self._wall.create_faults.pop(0) if self._wall.create_faults else ""
        if fault == "refuse":
            raise client_error("RunInstances", "InsufficientInstanceCapacity", 500)
        if fault == "lose":
            raise ConnectionClosedError(endpoint_url="https://ec2")
        answer = self._once(kwargs)
        if fault == "lose_answer":
            raise ReadTimeoutError(endpoint_url="https://ec2")
        return answer

    def _once(self, kwargs: Answer) -> Answer:
        token = kwargs["ClientToken"]
        if token not in self._wall.by_token:
            self._wall.by_token[token] = (kwargs, dict(self._inner.run_instances(**kwargs)))
        request, answer = self._wall.by_token[token]
        if request != kwargs:
            raise client_error("RunInstances", "IdempotentParameterMismatch", 400)
        return answer

    def describe_instances(self, **kwargs: Any) -> Answer:
        self._arrive("DescribeInstances")
        listing = "InstanceIds" not in kwargs
        fault = self._wall.list_faults.pop(0) if listing and self._wall.list_faults else ""
        if fault == "garble":
            return {"ResponseMetadata": {"HTTPStatusCode": 200}}
        if fault == "first_page":
            self._wall.list_faults.insert(0, "second_page")
            return {"Reservations": [], "NextToken": "page-2"}
        if fault == "second_page":
            raise client_error("DescribeInstances", "InternalError", 500)
        answer = dict(self._inner.describe_instances(**kwargs))
        answer["Reservations"] = [self._seen(group, listing) for group in answer["Reservations"]]
        return answer

    def _seen(self, group: Answer, listing: bool) -> Answer:
        rows = [row for row in group["Instances"] if not listing or self._shown(row["InstanceId"])]
        return {
            **group,
            "Instances": [self._end(row) if row["InstanceId"] in self._wall.taken else row for row in rows],
        }

    def _shown(self, instance_id: str) -> bool:
        return self._wall.visible is None or instance_id in self._wall.visible

    @staticmethod
    def _end(row: Answer) -> Answer:
        reason = {"Code": "Server.SpotInstanceTermination", "Message": "Spot instance termination"}
        return {**row, "State": {"Code": 32, "Name": "shutting-down"}, "StateReason": reason}

    def terminate_instances(self, **kwargs: Any) -> Answer:
        self._arrive("TerminateInstances")
        if self._wall.release_faults:
            self._wall.release_faults -= 1
            raise client_error("TerminateInstances", "InternalError", 500)
        return dict(self._inner.terminate_instances(**kwargs))

    def describe_spot_price_history(self, **kwargs: Any) -> Answer:
        self._arrive("DescribeSpotPriceHistory")
        if self._wall.search_faults:
            self._wall.search_faults.pop()
            return {"ResponseMetadata": {"HTTPStatusCode": 200}}
        return {"SpotPriceHistory": list(self._history(kwargs["InstanceTypes"], kwargs["ProductDescriptions"]))}

    def _history(self, types: Sequence[str], products: Sequence[str]) -> Iterator[Answer]:
        now = datetime.now(UTC)
        for name, price in PRICES.items():
            for zone in ZONES:
                row = {"InstanceType": name, "AvailabilityZone": zone, "ProductDescription": "Linux/UNIX"}
                old = {**row, "SpotPrice": "99.0", "Timestamp": now - timedelta(days=1)}
                windows = {**row, "ProductDescription": "Windows", "SpotPrice": "0.0001", "Timestamp": now}
                for one in (old, {**row, "SpotPrice": price, "Timestamp": now - timedelta(hours=1)}, windows):
                    fits = name in types and one["ProductDescription"] in products
                    if fits or self._wall.ignore_filters:
                        yield one

    def get_console_output(self, **kwargs: Any) -> Answer:
        self._arrive("GetConsoleOutput")
        return dict(self._inner.get_console_output(**kwargs))

    def close(self) -> None:
        """The inner client serves other tests too."""
