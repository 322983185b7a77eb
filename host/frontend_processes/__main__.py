"""Starts a frontend process: `__main__.py SPAWN`. Only the server starts it."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _here)  # otherwise Python has done this
    sys.path[0] = os.path.dirname(os.path.dirname(_here))

    from stub.wire.early_imports import import_dependencies

    import_dependencies(("msgspec",))  # it speaks to no stub

    from host.frontend_processes.frontend_process import run_frontend

    run_frontend(sys.argv[1])
