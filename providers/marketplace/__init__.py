"""A local marketplace that speaks vast.ai's HTTP API and whose machines are real processes on this computer.

Invariant: it bills like vast.ai, to the micro-dollar, and when it stops nothing of it is left running.
"""

from .config import ConfigError, MarketConfig
from .server import MarketServer, create_app, serve

__all__ = ["ConfigError", "MarketConfig", "MarketServer", "create_app", "serve"]
