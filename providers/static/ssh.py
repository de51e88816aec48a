"""One command on one machine, by the system's own ssh.

Invariant: the command line holds the machine's address and nothing secret: what runs comes in on standard input. Each
command has a deadline, and is sent once.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from dataclasses import dataclass

from providers.base import AuthError, ProviderError, Transient

from .machines import Machine

CONNECT_S = 10
COMMAND_S = 60.0
_AUTH = re.compile(r"permission denied|too many authentication failures|host key verification failed|no such identity",
                   re.IGNORECASE)  # fmt: skip
_UNREACHED = re.compile(
    r"could not resolve|connection refused|no route to host|network is unreachable|connect to (?:host )?\S+ port \d+"
    r"|connection timed out during banner exchange",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Failed:
    """Why a command gave no result. `reached` False: it certainly never began."""

    error: ProviderError
    reached: bool


def command(machine: Machine, executable: str = "ssh") -> list[str]:
    """ssh's arguments for a script on standard input."""
    options = {
        "BatchMode": "yes", "ConnectTimeout": str(CONNECT_S), "ServerAliveInterval": "5", "ServerAliveCountMax": "3",
        "ConnectionAttempts": "1", "LogLevel": "ERROR", "ClearAllForwardings": "yes", "RequestTTY": "no",
    }  # fmt: skip
    words = [executable, "-p", str(machine.port)]
    for name, value in options.items():
        words += ["-o", f"{name}={value}"]
    if machine.identity_file:
        words += ["-i", machine.identity_file, "-o", "IdentitiesOnly=yes"]
    return [*words, "-l", machine.user, "--", machine.address, "bash -s"]


def judge(status: int, errors: str, provider: str) -> Failed:
    """What an ssh that ended with `status` means. ssh's own failures are 255."""
    said = errors.strip()[-300:]
    if status == 255 and _AUTH.search(said):
        return Failed(AuthError(f"ssh: {said}", provider=provider, raw=said), reached=False)
    return Failed(
        Transient(f"ssh ended with status {status}: {said or 'no reason given'}", provider=provider, raw=said),
        reached=not (status == 255 and _UNREACHED.search(said)),
    )


async def run(
    machine: Machine, script: str, provider: str, *, executable: str = "ssh", timeout_s: float = COMMAND_S
) -> str | Failed:
    """What the script printed, or why there is no result."""
    try:
        process = await asyncio.create_subprocess_exec(
            *command(machine, executable), stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
        )  # fmt: skip
    except OSError as error:
        lost = Transient(f"{executable} can't be started: {error}; install an OpenSSH client", provider=provider)
        return Failed(lost, reached=False)
    try:
        async with asyncio.timeout(timeout_s):
            out, err = await process.communicate(script.encode())
    except TimeoutError:
        late = Transient(f"ssh to {machine.name} took more than {timeout_s:.0f} s", provider=provider)
        return Failed(late, reached=True)
    finally:
        if process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                process.kill()
            await process.wait()
    if process.returncode != 0:
        return judge(process.returncode or 0, err.decode(errors="replace"), provider)
    return out.decode(errors="replace")
