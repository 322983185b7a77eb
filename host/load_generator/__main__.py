"""Starts a worker process of the load generator: `__main__.py DESCRIPTOR`."""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _here)  # otherwise Python has done this
    sys.path[0] = os.path.dirname(os.path.dirname(_here))

    from stub.wire.early_imports import import_dependencies

    import_dependencies(("msgspec",))

    from host.load_generator.worker import run_worker

    run_worker(int(sys.argv[1]))
