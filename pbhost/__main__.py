"""The command `pbhost`, also as `python -m pbhost`."""

from __future__ import annotations

import importlib
import sys

_INTERRUPTED = 130  # as shells report it


def main() -> None:
    """Runs `pbhost <command> ...`; exits with the status of the command."""
    try:
        importlib.import_module("pbhost.host.__main__").main()
    except KeyboardInterrupt:  # before the command handles it, as while its modules are imported
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, whose modules must not reach the server
    main()
