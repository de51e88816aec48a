"""The calls of boto3 that the adapter uses, and clients that send each of them once.

Invariant: no client waits without end or retries: boto3 would send a create again after a dropped connection.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError

from providers.base import BadRequest

from .config import Ec2Config

CONNECT_S, READ_S = 10, 30
"""READ_S is longer than SQS's longest poll, 20 s."""
Answer = Mapping[str, Any]


class Ec2Api(Protocol):
    """The part of boto3's EC2 client that the adapter uses."""

    def run_instances(self, **kwargs: Any) -> Answer:
        """RunInstances."""
        ...

    def describe_instances(self, **kwargs: Any) -> Answer:
        """DescribeInstances, one page."""
        ...

    def terminate_instances(self, **kwargs: Any) -> Answer:
        """TerminateInstances."""
        ...

    def describe_spot_price_history(self, **kwargs: Any) -> Answer:
        """DescribeSpotPriceHistory, one page."""
        ...

    def get_console_output(self, **kwargs: Any) -> Answer:
        """GetConsoleOutput."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


class SqsApi(Protocol):
    """The part of boto3's SQS client that the adapter uses."""

    def receive_message(self, **kwargs: Any) -> Answer:
        """ReceiveMessage."""
        ...

    def delete_message(self, **kwargs: Any) -> Any:
        """DeleteMessage."""
        ...

    def close(self) -> None:
        """Close connections."""
        ...


@dataclass(frozen=True, slots=True)
class Clients:
    """What the adapter talks through. `sqs` is None where there is no queue."""

    ec2: Ec2Api
    sqs: SqsApi | None = None


def make_clients(config: Ec2Config) -> Clients:
    """boto3's clients for the account. Nothing is sent. BadRequest for what boto3 can't work with: a region, a URL, a
    profile or file of its own."""
    try:
        return _clients(config)
    except (BotoCoreError, ValueError) as error:
        raise BadRequest(f"boto3 can't be set up: {error}") from error


def _clients(config: Ec2Config) -> Clients:
    session = boto3.session.Session(
        aws_access_key_id=config.access_key_id, aws_secret_access_key=config.secret_access_key,
        aws_session_token=config.session_token, region_name=config.region,
    )  # fmt: skip
    once = Config(
        connect_timeout=CONNECT_S, read_timeout=READ_S, retries={"total_max_attempts": 1, "mode": "standard"},
        user_agent_extra="echo2",
    )  # fmt: skip
    ec2: Ec2Api = session.client("ec2", endpoint_url=config.endpoint_url, config=once)
    if config.notice_queue_url is None:
        return Clients(ec2)
    sqs: SqsApi = session.client("sqs", endpoint_url=config.endpoint_url, config=once)
    return Clients(ec2, sqs)
