#!/bin/sh
# Makes a bare machine (Python 3.11 or newer with venv, a GPU driver, network access) a rollout agent: installs the package
# into a folder of its own, then becomes the agent. Safe to run again: what is installed stays.
#
#   ECHO2_CONTROL_URL    address of the control service
#   ECHO2_JOIN_TOKEN     one-time token, made by the control service when it rents a machine
#   ECHO2_AGENT_PACKAGE  a pip requirement; default echo2[agent]
#   ECHO2_HOME           where to install; default ~/echo2
set -eu

: "${ECHO2_CONTROL_URL:?set it to the address of the control service}"
: "${ECHO2_JOIN_TOKEN:?set it to the join token of this machine}"
package=${ECHO2_AGENT_PACKAGE:-echo2[agent]}
home=${ECHO2_HOME:-"$HOME/echo2"}
python=${PYTHON:-python3}

if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))'; then
  echo "$python is older than Python 3.11; set PYTHON to a newer one" >&2
  exit 2
fi

mkdir -p "$home"
if [ ! -x "$home/venv/bin/echo2" ]; then
  "$python" -m venv "$home/venv"
  "$home/venv/bin/python" -m pip install --quiet --disable-pip-version-check "$package"
fi

cd "$home"
exec "$home/venv/bin/echo2" agent
