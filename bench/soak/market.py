"""The local marketplace on the shared clock: `python -m bench.soak.market FOLDER`."""

from __future__ import annotations

import asyncio
import logging
import signal
import sys
from pathlib import Path

from bench.soak.clock import SharedClock
from bench.soak.place import KEY, Place
from providers.marketplace import MarketConfig, MarketServer
from providers.marketplace.config import MICROS


async def main(place: Place) -> None:
    """Run until SIGTERM."""
    config = MarketConfig(
        state_dir=place.folder / "market",
        api_key=KEY,
        control_enabled=True,
        list_lag_s=12.0,
        start_delay_s=30.0,
        stop_grace_s=1.0,
        tick_s=0.02,
        credit_micros=10**6 * MICROS,
        machines_file=place.prices,
    )
    server = MarketServer(config, SharedClock(place.clock))
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, server.request_stop)
    async with server:
        ready = place.url.with_suffix(".new")
        ready.write_text(server.url)
        ready.rename(place.url)
        await server.wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(main(Place(Path(sys.argv[1]))))
