"""EC2's adapter in front of moto's server, through a client that adds what moto has not.

Invariant: moto launches, tags, lists, terminates and delivers events; all else is `walled_ec2`'s.
"""

from __future__ import annotations

import atexit
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import boto3
import httpx
from moto.server import ThreadedMotoServer

from providers.base import Billing, Offer, OfferQuery, Provider, RentSpec
from providers.ec2 import Ec2Config, EC2Spot
from providers.ec2.clients import Clients, make_clients
from providers.ec2.config import DEFAULT_TYPES
from providers.ec2.parse import LABEL_TAG

from .harness import UNKNOWN_GPU, Harness, Registered, rent_spec
from .walled_ec2 import Wall, WalledEc2

KEY = "conformance-secret-0123456789"
AMI = "ami-12c6146b"


@dataclass(frozen=True)
class Moto:
    """A server and clients for it, made once a test run: boto3 takes half a second to make them."""

    url: str
    config: Ec2Config
    clients: Clients
    raw: Any
    sqs: Any
    events: Any


@cache
def moto() -> Moto:
    """The server of this test run."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    atexit.register(server.stop)
    host, port = server.get_host_and_port()
    url = f"http://{host}:{port}"
    config = Ec2Config(
        "us-east-1", AMI, endpoint_url=url, notice_queue_url=f"{url}/123456789012/echo2",
        access_key_id="AKIACONFORMANCE", secret_access_key=KEY,
    )  # fmt: skip
    session = boto3.session.Session("a", "b", region_name="us-east-1")
    raw, sqs, events = (session.client(name, endpoint_url=url) for name in ("ec2", "sqs", "events"))
    return Moto(url, config, make_clients(config), raw, sqs, events)


class _Ec2:
    def __init__(self, server: Moto, folder: Path) -> None:
        self._server = server
        self.wall = Wall()
        types = folder / "types.toml"
        row = "num_gpus = 1\ngpu_ram_mb = 16384\nvcpus = 4\nnetwork_gbit_s = 5.0\n"
        types.write_text(f'{DEFAULT_TYPES.read_text()}\n["x9.large"]\ngpu_name = "{UNKNOWN_GPU}"\n{row}')
        self._config = replace(server.config, types_file=types)
        self._adapters: list[EC2Spot] = []
        self._provider = self._adapter()
        self._queue()

    def _queue(self) -> None:
        """EC2's events into the queue, as the documentation says to set it up."""
        sqs, rules = self._server.sqs, self._server.events
        url = sqs.create_queue(QueueName="echo2")["QueueUrl"]
        assert url == self._config.notice_queue_url
        arn = sqs.get_queue_attributes(QueueUrl=url, AttributeNames=["QueueArn"])["Attributes"]["QueueArn"]
        rules.put_rule(Name="echo2", EventPattern=json.dumps({"source": ["aws.ec2"]}), State="ENABLED")
        rules.put_targets(Rule="echo2", Targets=[{"Id": "queue", "Arn": arn}])

    def _adapter(self, *, denied: bool = False) -> EC2Spot:
        real = self._server.clients
        made = EC2Spot(self._config, clients=Clients(WalledEc2(real.ec2, self.wall, denied=denied), real.sqs))
        self._adapters.append(made)
        return made

    @property
    def provider(self) -> Provider:
        return self._provider

    @property
    def secret(self) -> str:
        return KEY

    def with_wrong_key(self) -> Provider:
        return self._adapter(denied=True)

    def query(self) -> OfferQuery:
        return OfferQuery(Billing.SPOT_MARKET)

    def spec(self, offer: Offer, label: str) -> RentSpec:
        return rent_spec(offer, label, ports=(7070,))

    async def calls(self) -> int:
        return self.wall.calls

    async def creates(self) -> int:
        return len(self.wall.creates)

    async def create_tokens(self) -> Sequence[str]:
        return [request["ClientToken"] for request in self.wall.creates]

    async def ignore_filters(self) -> None:
        self.wall.ignore_filters = True

    async def garble_next_search(self) -> None:
        self.wall.search_faults.append("garble")

    async def refuse_next_create(self) -> None:
        self.wall.create_faults.append("refuse")

    async def lose_next_create(self, *, created: bool) -> None:
        self.wall.create_faults.append("lose_answer" if created else "lose")

    async def hide_new(self) -> None:
        groups = self._server.raw.describe_instances()["Reservations"]
        self.wall.visible = {row["InstanceId"] for group in groups for row in group["Instances"]}

    async def show_new(self) -> None:
        self.wall.visible = None

    async def truncate_next_listing(self) -> None:
        self.wall.list_faults.append("first_page")

    async def garble_next_listing(self) -> None:
        self.wall.list_faults.append("garble")

    async def vanish(self, instance_id: str) -> None:
        self._server.raw.terminate_instances(InstanceIds=[instance_id])

    async def preempt(self, instance_id: str) -> None:
        self.wall.taken.add(instance_id)

    async def announce(self, instance_id: str) -> None:
        detail = {"instance-id": instance_id, "instance-action": "terminate"}
        kind = "EC2 Spot Instance Interruption Warning"
        self._server.events.put_events(
            Entries=[{"Source": "aws.ec2", "DetailType": kind, "Detail": json.dumps(detail)}]
        )

    async def fail_releases(self, count: int) -> None:
        self.wall.release_faults += count

    async def add_foreign(self, label: str) -> str:
        tags = [{"ResourceType": "instance", "Tags": [{"Key": LABEL_TAG, "Value": label}]}]
        made = self._server.raw.run_instances(ImageId=AMI, MinCount=1, MaxCount=1, TagSpecifications=tags)
        return str(made["Instances"][0]["InstanceId"])

    async def close(self) -> None:
        for adapter in self._adapters:
            await adapter.aclose()


@asynccontextmanager
async def open_harness(folder: Path) -> AsyncIterator[Harness]:
    """A fresh account at moto."""
    server = moto()
    # moto keeps its state in this process.
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http:
        (await http.post("/moto-api/reset")).raise_for_status()
    harness = _Ec2(server, folder)
    yield harness
    await harness.close()


REGISTERED = Registered(
    "ec2", open_harness,
    not_applicable={"test_spot_without_support_is_refused_before_any_call": "EC2 has spot instances"},
)  # fmt: skip
