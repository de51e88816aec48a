"""What the agent costs: against its engine driven directly, at a swap, and when machines die.

Three parts, each told as it ends: the speed through the agent's worker beside a bare loop over the same vLLM server;
what a swap takes beyond the engine's own load of the weights; and the whole service with three nodes, one of which is
killed (SIGKILL) every minute. `--python` has vLLM installed. The last line is one JSON object.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Sequence
from typing import Any

from bench.agent_kills import kills
from bench.agent_speed import compare, rig, swaps


async def vllm(options: argparse.Namespace) -> dict[str, Any]:
    """The two parts that need a vLLM server; it is started once."""
    async with rig(options.python, options.max_tokens) as found:
        speed = await compare(found, options.seconds, options.rounds, say)
        swapped = await swaps(found, options.swaps)
    for part in (speed, swapped):
        say(json.dumps(part))
    return speed | swapped


def say(line: str) -> None:
    """Tell at once."""
    print(line, flush=True)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python", default=sys.executable)
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=128)
    parser.add_argument("--swaps", type=int, default=10)
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--parts", default="vllm,kills")
    options = parser.parse_args(arguments)
    if unknown := set(options.parts.split(",")) - {"vllm", "kills"}:
        parser.error(f"--parts: {', '.join(sorted(unknown))} is none of vllm, kills")
    found: dict[str, Any] = {}
    if "vllm" in options.parts:
        found |= asyncio.run(vllm(options))
    if "kills" in options.parts:
        found |= kills(options.minutes, say)
    print(json.dumps(found))
    return 0


if __name__ == "__main__":
    sys.exit(main())
