"""The command `pbhost`, also as `python -m pbhost`."""

from __future__ import annotations

import importlib
import sys


def main() -> None:
    """Runs `pbhost <command> ...`; exits with the status of the command."""
    importlib.import_module("pbhost.host.__main__").main()


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, whose modules must not reach the server
    main()
