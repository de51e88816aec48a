"""What a rented machine is told: the script it runs and its environment. Pure.

Invariant: a machine gets the control URL and a one-time join token and no other secret.
"""

from __future__ import annotations

from collections.abc import Mapping

RELAY_PORT = 7070
"""Container port of the snapshot relay."""

_SCRIPT = r"""set -eu
: "${ECHO2_CONTROL_URL:?set it to the address of the control service}"
: "${ECHO2_JOIN_TOKEN:?set it to the join token of this machine}"
package=${ECHO2_AGENT_PACKAGE:-echo2[agent]}
home=${ECHO2_HOME:-"${HOME:-/root}/echo2"}
python=${PYTHON:-python3}
engine=${ECHO2_ENGINE:-transformers}

# progress PHASE DETAIL [BYTES]: tells the control service; that it is not heard changes nothing.
progress() {
  "$python" - "$@" >/dev/null 2>&1 <<'PY' || true
import json, os, sys, urllib.request
told = {"phase": sys.argv[1], "detail": sys.argv[2][:200]}
if len(sys.argv) > 3: told["have"] = int(sys.argv[3])
head = {"Authorization": "Bearer " + os.environ["ECHO2_JOIN_TOKEN"], "Content-Type": "application/json"}
url = os.environ["ECHO2_CONTROL_URL"].rstrip("/") + "/v1/nodes/progress"
urllib.request.urlopen(urllib.request.Request(url, json.dumps(told).encode(), head), timeout=5)
PY
}
# One package comes as source only, and vLLM's kernels are compiled on the machine.
tools() {
  command -v cc >/dev/null && "$python" -c 'import ensurepip, os, sysconfig
os.stat(sysconfig.get_path("include") + "/Python.h")'
} >/dev/null 2>&1
fail() { echo "echo2: $1" >&2; progress installing "$1"; exit 2; }

progress booting ""
if command -v echo2 >/dev/null 2>&1; then
  progress joining "the agent starts"
  exec echo2 agent
fi
"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null ||
  fail "$python is missing or older than Python 3.11; set PYTHON to a newer one"

if [ "${ECHO2_APT:-}" ] && ! tools; then
  progress installing "a C compiler and Python's headers"
  name=${python##*/}
  export DEBIAN_FRONTEND=noninteractive
  { timeout 300 apt-get update && timeout 600 apt-get -o DPkg::Lock::Timeout=120 install -y --no-install-recommends \
    gcc libc6-dev "$name-dev" "$name-venv"; } >/dev/null 2>&1 || true
fi

if [ "$engine" = auto ]; then
  mb=$(nvidia-smi --query-gpu=memory.total --format=csv,noheader,nounits 2>/dev/null | sort -n | head -n 1) || mb=
  if [ "${mb:-0}" -ge 15000 ] 2>/dev/null; then engine=vllm; else engine=transformers; fi
fi
if [ "$engine" = vllm ]; then package=$(printf %s "$package" | sed '/[[,]vllm[],]/!s/\[\([^]]*\)\]/[\1,vllm]/'); fi
exact=${ECHO2_AGENT_CONSTRAINTS-"${ECHO2_CONTROL_URL%/}/v1/agent/constraints?engine=$engine"}

mkdir -p "$home/tmp"
if [ "$(cat "$home/installed" 2>/dev/null)" != "$package $exact" ]; then
  # Bytes on disk are what shows that a large package still comes.
  (while sleep 10; do progress installing "$package" "$(du -sk "$home" | cut -f 1)000"; done) >/dev/null 2>&1 &
  watcher=$!
  trap 'kill $watcher 2>/dev/null' EXIT
  progress installing "$package"
  # One that was left half made has no pip.
  "$home/venv/bin/python" -m pip --version >/dev/null 2>&1 || "$python" -m venv --system-site-packages "$home/venv" ||
    fail "$python can't make a venv; install its venv module (Debian: python3-venv)"
  try=1
  until TMPDIR="$home/tmp" "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check \
    ${exact:+-c "$exact"} "$package"; do
    [ "$try" -lt 4 ] || fail "pip can't install $package$(tools || echo '; no C compiler or Python.h: gcc python3-dev')"
    sleep $((try * ${ECHO2_RETRY_S:-10}))
    try=$((try + 1))
  done
  echo "$package $exact" >"$home/installed"
  kill "$watcher" 2>/dev/null || true
fi
progress joining "the agent starts"
cd "$home"
exec "$home/venv/bin/echo2" agent
"""
"""The same as deploy/agent/bootstrap.sh, which explains it: the package does not carry that folder."""


def onstart(package: str) -> str:
    """Shell script for the provider's onstart: install the agent where the image lacks it, then become it.

    It tells how far it is meanwhile, and takes exact versions from `GET /v1/agent/constraints`.
    """
    # Without what only a reader needs: vast.ai takes 4,096 characters.
    lines = [line.strip() for line in _SCRIPT.splitlines() if not line.lstrip().startswith("#")]
    return "\n".join([f"export ECHO2_AGENT_PACKAGE={shell_quote(package)}", *lines, ""])


OWN_MACHINES = frozenset({"static", "marketplace"})
"""Providers whose machines are the user's own: nothing of their systems is changed."""


def environment(
    *,
    control_url: str,
    join_token: str,
    engine: str,
    provider: str,
    hf_endpoint: str | None = None,
    further: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Environment of the machine. `hf_endpoint`: a mirror of the Hugging Face Hub; `further`: what the user adds."""
    told = {**(further or {}), "ECHO2_CONTROL_URL": control_url, "ECHO2_JOIN_TOKEN": join_token, "ECHO2_ENGINE": engine}
    told |= {"ECHO2_HF_ENDPOINT": hf_endpoint} if hf_endpoint is not None else {}
    return told if provider in OWN_MACHINES else {**told, "ECHO2_APT": "1", "ECHO2_TUNE_NETWORK": "1"}


def shell_quote(text: str) -> str:
    """Single-quoted for sh."""
    return "'" + text.replace("'", "'\"'\"'") + "'"
