"""The command `pbhost`, also as `python -m pbhost`."""

from __future__ import annotations

import importlib
import signal
import sys

_INTERRUPTED = 130  # as shells report it


def main() -> None:
    """Runs `pbhost <command> ...`; exits with the status of the command."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until the command runs: an exception would interrupt the import of any module.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        importlib.import_module("pbhost.host.__main__").main()
    except KeyboardInterrupt:  # before the command handles it
        sys.exit(_INTERRUPTED)


if __name__ == "__main__":
    if not getattr(sys.flags, "safe_path", False):
        del sys.path[0]  # the working directory, whose modules must not reach the server
    main()
