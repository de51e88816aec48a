"""The EC2 adapter with boto3's own client, over real connections: moto's server, and servers that misbehave."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from datetime import UTC, datetime

import httpx
import pytest

from providers import base
from providers.base import Billing, Offer, OfferQuery, Phase, RentSpec
from providers.ec2 import Ec2Config, EC2Spot
from providers.ec2.config import load_types
from providers.ec2.parse import offer

from .conformance.harness_ec2 import Moto, moto
from .rig import until

SPEC = RentSpec("echo2:f:l:1", "img", "exec echo2 agent", {"ECHO2_JOIN_TOKEN": "j0in-tok"}, 25.0, (7070,))
NO_CAPACITY = (
    "<Response><Errors><Error><Code>InsufficientInstanceCapacity</Code><Message>no</Message></Error></Errors>"
    "<RequestID>r</RequestID></Response>"
)


def pool(config: Ec2Config) -> Offer:
    """An offer as a search would give it."""
    kind = load_types(config)["g5.xlarge"]
    return offer(("g5.xlarge", "us-east-1a"), 431_000, kind, config, "ec2", datetime.now(UTC))


@pytest.fixture
async def market() -> Moto:
    server = moto()
    async with httpx.AsyncClient(base_url=server.url, trust_env=False, timeout=30) as http:
        (await http.post("/moto-api/reset")).raise_for_status()
    return server


@pytest.fixture
async def ec2(market: Moto) -> AsyncIterator[EC2Spot]:
    adapter = EC2Spot(market.config)
    yield adapter
    await adapter.aclose()


async def test_one_instance_with_tags_on_it_and_its_disk_and_no_secret_in_them(market: Moto, ec2: EC2Spot) -> None:
    result = await ec2.rent(pool(market.config), SPEC)
    assert result.outcome == "created"
    tags = market.raw.describe_tags()["Tags"]
    labelled = {tag["ResourceType"] for tag in tags if (tag["Key"], tag["Value"]) == ("echo2:label", SPEC.label)}
    assert {"instance", "volume"} <= labelled
    assert "j0in-tok" not in str(tags)
    (instance,) = (await ec2.list()).instances
    assert (instance.instance_id, instance.billing) == (result.instance_id, Billing.SPOT_MARKET)
    assert (instance.machine_id, instance.gpu_name) == ("g5.xlarge/us-east-1a", "A10G")
    assert instance.public_host
    assert instance.ports == {7070: 7070}
    told = market.raw.describe_instance_attribute(InstanceId=instance.instance_id, Attribute="userData")
    script = base64.b64decode(told["UserData"]["Value"]).decode()
    assert "export ECHO2_JOIN_TOKEN=j0in-tok\n" in script
    after = market.raw.describe_instance_attribute(
        InstanceId=instance.instance_id, Attribute="instanceInitiatedShutdownBehavior"
    )
    assert after["InstanceInitiatedShutdownBehavior"]["Value"] == "terminate"


async def test_subnets_groups_and_keys_are_used(market: Moto) -> None:
    subnets = market.raw.describe_subnets()["Subnets"]
    subnet = next(s["SubnetId"] for s in subnets if s["AvailabilityZone"] == "us-east-1a")
    group = market.raw.create_security_group(GroupName="echo2", Description="relay")["GroupId"]
    market.raw.create_key_pair(KeyName="ours")
    config = replace(market.config, subnets={"us-east-1a": subnet}, security_group_ids=(group,), key_name="ours")
    adapter = EC2Spot(config)
    result = await adapter.rent(pool(config), SPEC)
    assert result.error is None
    row = market.raw.describe_instances(InstanceIds=[result.instance_id])["Reservations"][0]["Instances"][0]
    assert (row["SubnetId"], row["KeyName"]) == (subnet, "ours")
    assert [g["GroupId"] for g in row["NetworkInterfaces"][0]["Groups"]] == [group]
    await adapter.aclose()


async def test_more_than_a_page_of_instances_is_listed(market: Moto, ec2: EC2Spot) -> None:
    tags = [{"ResourceType": "instance", "Tags": [{"Key": "echo2:label", "Value": "L"}]}]
    market.raw.run_instances(ImageId=market.config.image_id, MinCount=103, MaxCount=103, TagSpecifications=tags)
    market.raw.run_instances(ImageId=market.config.image_id, MinCount=1, MaxCount=1)
    listing = await ec2.list()
    assert (listing.complete, len({i.instance_id for i in listing.instances})) == (True, 103)


async def test_a_release_ends_the_instance_and_an_unknown_id_is_gone(market: Moto, ec2: EC2Spot) -> None:
    made = (await ec2.rent(pool(market.config), SPEC)).instance_id
    assert made is not None

    async def phase() -> Phase | None:
        found = await ec2.get(made)
        return found.phase if found else None

    await until(phase, lambda p: p is Phase.RUNNING, "running")
    await ec2.release(made)
    assert await ec2.get(made) is None
    assert (await ec2.list()).instances == ()
    assert await ec2.get("i-0123456789abcdef0") is None
    await ec2.release("i-0123456789abcdef0")


async def test_the_console_and_the_prices_are_read_with_the_real_client(market: Moto, ec2: EC2Spot) -> None:
    made = (await ec2.rent(pool(market.config), SPEC)).instance_id
    assert made is not None
    assert isinstance(await ec2.logs(made, 10), str)
    offers = await ec2.search(OfferQuery(Billing.SPOT_MARKET, ("A10G",)))
    assert {o.gpu_name for o in offers} <= {"A10G"}


# servers that misbehave


@dataclass
class Rogue:
    """A server that answers each request with the same text, or closes the connection when there is none."""

    answer: str | None
    status: int = 200
    requests: int = 0
    url: str = ""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        length = next(int(h.split(b":")[1]) for h in head.split(b"\r\n") if h.lower().startswith(b"content-length"))
        await reader.readexactly(length)
        self.requests += 1
        if self.answer is not None:
            body = self.answer.encode()
            line = f"HTTP/1.1 {self.status} X\r\nContent-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            writer.write(line.encode() + body)
            await writer.drain()
        writer.close()


@asynccontextmanager
async def rogue(answer: str | None, status: int = 200) -> AsyncIterator[tuple[Rogue, EC2Spot]]:
    """A rogue and an adapter that talks to it."""
    one = Rogue(answer, status)
    server = await asyncio.start_server(one.serve, "127.0.0.1", 0)
    url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    adapter = EC2Spot(replace(moto().config, endpoint_url=url))
    async with server:
        yield one, adapter
    await adapter.aclose()


@pytest.mark.parametrize(
    ("answer", "status", "outcome", "error"),
    [
        (None, 0, "unknown", base.Transient),
        ("", 500, "unknown", base.Transient),
        ("<html>bad gateway</html>", 502, "unknown", base.Transient),
        ("<html>we are working on it</html>", 200, "unknown", base.MalformedAnswer),
        ("not XML", 200, "unknown", base.MalformedAnswer),
        (NO_CAPACITY, 500, "refused", base.NoCapacity),
        (NO_CAPACITY.replace("InsufficientInstanceCapacity", "RequestLimitExceeded"), 503, "refused", base.RateLimited),
        (NO_CAPACITY.replace("InsufficientInstanceCapacity", "VcpuLimitExceeded"), 400, "refused", base.QuotaError),
    ],
)
async def test_a_create_is_one_request_whatever_comes_back(
    answer: str | None, status: int, outcome: str, error: type[Exception]
) -> None:
    async with rogue(answer, status) as (server, adapter):
        result = await adapter.rent(pool(moto().config), SPEC)
        assert (result.outcome, result.instance_id) == (outcome, None)
        assert isinstance(result.error, error)
        assert server.requests == 1


async def test_a_create_that_could_not_be_sent_made_nothing() -> None:
    async with rogue(None) as (server, adapter):
        pass
    result = await adapter.rent(pool(moto().config), SPEC)
    assert (result.outcome, server.requests) == ("refused", 0)
    assert isinstance(result.error, base.Transient)


@pytest.mark.parametrize(
    ("answer", "status", "error"),
    [
        (None, 0, base.Transient),
        ("<html>bad gateway</html>", 502, base.Transient),
        ("<html>we are working on it</html>", 200, base.MalformedAnswer),
        ("not XML", 200, base.MalformedAnswer),
        (NO_CAPACITY.replace("InsufficientInstanceCapacity", "AuthFailure"), 401, base.AuthError),
    ],
)
async def test_a_list_and_a_release_that_failed_are_no_absence(
    answer: str | None, status: int, error: type[Exception]
) -> None:
    async with rogue(answer, status) as (_, adapter):
        with pytest.raises(error):
            await adapter.list()
        with pytest.raises(error):
            await adapter.get("i-1")
        with pytest.raises(error):
            await adapter.release("i-1")
