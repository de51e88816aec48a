"""The TOML file of settings that `ECHO2_CONFIG` names.

Invariant: a file that can't be read, is no TOML or has a key that is no setting is refused with one line that names it.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any

from app.protocol.errors import EchoError

CONFIG_VARIABLE = "ECHO2_CONFIG"


class SettingsError(EchoError):
    """A setting that can't be used. The message is one line that names it and says what it expects."""

    code = "bad_settings"
    title = "Bad settings"


def read_config(known: Collection[str]) -> dict[str, Any]:
    """The file named by ECHO2_CONFIG; nothing if it names none. Raises SettingsError, also for a key not in `known`."""
    path = os.environ.get(CONFIG_VARIABLE)
    if not path:
        return {}
    try:
        values = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except OSError as error:
        raise SettingsError(f"{CONFIG_VARIABLE}: {path!r}: {error.strerror}; expected a TOML file") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        what = " ".join(str(error).split())
        raise SettingsError(
            f"{CONFIG_VARIABLE}: {path!r} is not TOML: {what}; expected lines like port = 8080"
        ) from None
    for key in values:
        if key not in known:
            close = difflib.get_close_matches(key, known, n=1)
            hint = f"; did you mean {close[0]!r}?" if close else f"; expected some of {', '.join(known)}"
            raise SettingsError(f"{CONFIG_VARIABLE}: {path!r} has the unknown key {key!r}{hint}")
    return values
