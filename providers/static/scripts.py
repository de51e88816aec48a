"""What runs on a machine, as text for `bash -s` on its standard input.

Invariant: pure; every value that comes from outside is quoted, and no script signals a process that does not carry the
instance's mark in its environment. Linux only: processes are found in /proc.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from providers.base import BadRequest

MARK = "ECHO2_STATIC_INSTANCE"
"""Environment variable that a started process and all that it starts carry."""
STOP_GRACE_S = 10
FRESH_S = 30
"""A taken machine without a process is another's leftover only after this long: it may be just starting."""
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")

_HEAD = """\
set -u
umask 077
slot="$HOME/.echo2-machine"
id=%s
"""

# Members are told by their mark, not by a number alone: numbers are used again.
_MEMBERS = """\
marked() {
  for entry in $(grep -lzxF "%s=$1" /proc/[0-9]*/environ 2>/dev/null); do
    entry="${entry%%/environ}"
    read -r line 2>/dev/null <"$entry/stat" || continue
    case "${line##*) }" in Z*|X*) continue ;; esac
    echo "${entry#/proc/}"
  done
}
"""

# The folder is filled before it gets its name, so that whoever sees it sees all of it.
_START = """\
new="$slot.new.$$"
mkdir "$new" || exit 1
printf '%s' "$id" >"$new/id"
printf '%s' {label} >"$new/label"
printf '%s' {script} >"$new/run"
date +%s >"$new/at"
if ! mv -T "$new" "$slot" 2>/dev/null; then
  owner="$(cat "$slot/id" 2>/dev/null)"
  at="$(cat "$slot/at" 2>/dev/null)"
  if [ "$owner" = "$id" ]; then rm -rf "$new"; echo "@started $at"; exit 0; fi
  busy=yes
  [ -n "$owner" ] && [ $(($(date +%s) - ${at:-0})) -gt {fresh} ] && [ -z "$(marked "$owner")" ] && busy=
  [ -n "$busy" ] || rm -rf "$slot"
  if [ -n "$busy" ] || ! mv -T "$new" "$slot" 2>/dev/null; then rm -rf "$new"; echo "@busy"; exit 0; fi
fi
cd "$HOME"
{mark}="$id" setsid bash "$slot/run" >"$slot/log" 2>&1 </dev/null &
printf '%s' "$!" >"$slot/pid"
echo "@started $(cat "$slot/at")"
"""

_CHECK = """\
owner="$(cat "$slot/id" 2>/dev/null)"
if [ -z "$owner" ]; then echo "@none"; exit 0; fi
state=exited
[ -n "$(marked "$owner")" ] && state=running
echo "@instance $state $owner $(cat "$slot/at" 2>/dev/null) $(date +%s)"
echo "@label $(cat "$slot/label" 2>/dev/null)"
"""

_STOP = """\
[ "$(cat "$slot/id" 2>/dev/null)" = "$id" ] || { echo "@gone"; exit 0; }
group="$(cat "$slot/pid" 2>/dev/null)"
end() {
  members="$(marked "$id")"
  [ -n "$members" ] || return 1
  for pid in $members; do
    [ "$pid" = "$group" ] && kill -s "$1" -- "-$group" 2>/dev/null
  done
  kill -s "$1" $members 2>/dev/null
  return 0
}
end TERM
left={tenths}
while [ -n "$(marked "$id")" ] && [ "$left" -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
left=20
while end KILL && [ "$left" -gt 0 ]; do sleep 0.1; left=$((left - 1)); done
if [ -n "$(marked "$id")" ]; then echo "@alive"; exit 0; fi
rm -rf "$slot"
echo "@gone"
"""


def _head(instance_id: str) -> str:
    return _HEAD % shlex.quote(instance_id) + _MEMBERS % MARK


def program(onstart: str, env: Mapping[str, str], public: tuple[str, int] | None, ports: Sequence[int]) -> str:
    """What the machine runs: its environment, then `onstart`. BadRequest for a name that is no variable's.

    `public` is the address and port where the first of `ports` is reached, by the names that a node reads.
    """
    wrong = [name for name in env if not _VARIABLE.fullmatch(name)]
    if wrong:
        raise BadRequest(f"env has a name that is no variable's: {wrong[0][:60]!r}")
    known = dict(env)
    if public is not None and ports:
        known = {"PUBLIC_IPADDR": public[0], f"VAST_TCP_PORT_{ports[0]}": str(public[1]), **known}
    lines = [f"export {name}={shlex.quote(value)}" for name, value in known.items()]
    return "\n".join([*lines, onstart, ""])


def start(instance_id: str, label: str, text: str) -> str:
    """Take the machine and start `text` in a session of its own. Says "@started EPOCH" or "@busy".

    Asked twice for one instance it starts nothing more.
    """
    body = _START.replace("{label}", shlex.quote(label)).replace("{mark}", MARK)
    return _head(instance_id) + body.replace("{fresh}", str(FRESH_S)).replace("{script}", shlex.quote(text))


def check() -> str:
    """Who has the machine: "@none", or "@instance running|exited ID BEGUN NOW" (epoch seconds) and "@label LABEL"."""
    return _head("") + _CHECK


def stop(instance_id: str, grace_s: float = STOP_GRACE_S) -> str:
    """End the instance: TERM, after `grace_s` KILL. Says "@gone", or "@alive" when something of it outlived that."""
    return _head(instance_id) + _STOP.replace("{tenths}", str(max(1, round(grace_s * 10))))


def logs(instance_id: str, tail: int) -> str:
    """The last lines that the instance printed, after a line "@log"."""
    return _head(instance_id) + (
        f'[ "$(cat "$slot/id" 2>/dev/null)" = "$id" ] || exit 0\necho "@log"\ntail -n {int(tail)} "$slot/log"\n'
    )


@dataclass(frozen=True, slots=True)
class Seen:
    """What a machine says that it runs."""

    instance_id: str
    label: str
    running: bool
    started_at: float | None
    """Epoch seconds, by our clock: the machine's own may be wrong, and time is money."""


class Unclear(ValueError):
    """The answer is not one of a script of ours."""


def read_check(output: str, now: float) -> Seen | None:
    """The answer to `check`, read at `now`; None when nothing of ours is on the machine. Unclear for anything else."""
    words = [line for line in output.splitlines() if line.startswith("@")]
    if words == ["@none"]:
        return None
    first = words[0].split() if words else []
    if len(words) != 2 or len(first) < 3 or first[0] != "@instance" or not words[1].startswith("@label "):
        raise Unclear("the machine did not say what it runs")
    told = [float(word) for word in first[3:] if word.isdecimal()]
    begun = now - max(0.0, told[1] - told[0]) if len(told) == 2 else None
    return Seen(first[2], words[1].removeprefix("@label "), first[1] == "running", begun)


def verdict(output: str, *known: str) -> str:
    """The one word of `known` that the script said. Unclear when it said none."""
    said = [line.split()[0] for line in output.splitlines() if line.startswith("@")]
    if len(said) != 1 or said[0] not in known:
        raise Unclear(f"the machine said none of {', '.join(known)}")
    return said[0]
