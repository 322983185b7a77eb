"""The server. Private: programs import `pbhost`.

Its public names are still here, as programs imported them from here before `pbhost` had them.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

import pbhost

if TYPE_CHECKING:
    from pbhost import *  # noqa: F403

if __name__ == "host":  # the name under which no module of ours is loaded, see `pbhost._packages`
    sys.modules["host"] = importlib.import_module("pbhost.host")

if not TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Imports a public name on first use."""
        if name in pbhost.__all__ and name != "bind":  # which is a package here
            return getattr(pbhost, name)
        raise AttributeError(f"module 'host' has no attribute '{name}'")
