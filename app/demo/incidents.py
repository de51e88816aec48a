"""What happens to the demo's job: a machine dies, a price rises.

Invariant: it uses what anybody could: the marketplace's control side, and a signed webhook.
"""

from __future__ import annotations

import json
import secrets
from datetime import UTC, datetime
from typing import Any

import httpx
from standardwebhooks import Webhook

from app.client import unwrap
from app.demo.stage import Stage
from app.protocol.base import micros, usd


class Incidents:
    """What happens to the job: a machine dies at a quarter of the steps, a price rises at the half."""

    def __init__(self, stage: Stage, market: httpx.Client, steps: int) -> None:
        self.stage = stage
        self.market = market
        self.kill_at = steps // 4
        self.price_at = steps // 2
        self.killed: str | None = None
        self.priced: str | None = None
        self.answered_at: datetime | None = None

    def update(self, job: dict[str, Any], fleet: dict[str, Any]) -> None:
        """Cause what is due."""
        active = [n for n in fleet["nodes"] if n["state"] == "active"]
        if self.killed is None and job["step"] >= self.kill_at and len(active) >= 2:
            # The head of a chain: those behind it must find another upstream.
            victim = min(active, key=lambda n: (n["chain_position"], n["id"]))
            unwrap(self.market.post(f"/_market/machines/{victim['machine_id']}/kill"))
            self.killed = victim["machine_id"]
        elif self.priced is None and self.killed is not None and job["step"] >= self.price_at and len(active) >= 2:
            self._raise_price(min(active, key=lambda n: n["rho"]))

    def _raise_price(self, node: dict[str, Any]) -> None:
        """Tell the service by webhook, then let the marketplace do it."""
        gpu_name = node["gpu_name"]
        price = usd(micros(node["price_per_hour"]) * 4)
        message = {
            "provider": "marketplace",
            "selector": {"gpu_name": gpu_name},
            "price_per_hour": price,
            "effective_at": datetime.now(UTC).isoformat(),
        }
        body = json.dumps(message)
        headers = self._sign(body)
        response = httpx.post(
            f"{self.stage.control_url}/v1/hooks/spot-price", content=body, headers=headers, timeout=10, trust_env=False
        )
        unwrap(response)
        self.answered_at = datetime.now(UTC)
        self.priced = gpu_name
        unwrap(
            self.market.post(
                "/_market/price", json={"selector": {"gpu_name": gpu_name}, "min_bid": price, "dph_base": price}
            )
        )

    def _sign(self, body: str) -> dict[str, str]:
        message_id, now = f"msg_{secrets.token_hex(8)}", datetime.now(UTC)
        signature = Webhook(self.stage.webhook_secret).sign(message_id, now, body)
        return {
            "webhook-id": message_id,
            "webhook-timestamp": str(int(now.timestamp())),
            "webhook-signature": signature,
            "content-type": "application/json",
        }
