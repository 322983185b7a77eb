"""Runs a target under atheris.

    python -m tests.fuzz <codec|frames|h2|http> [libFuzzer's arguments]

Atheris is not among the extras: install it beside the host's dependencies.
"""

from __future__ import annotations

import asyncio
import importlib
import sys

import atheris  # pyright: ignore[reportMissingImports]

if __name__ == "__main__":
    name = sys.argv.pop(1)
    target = importlib.import_module(f"tests.fuzz.{name}_target")
    # `instrument_imports` does not see the modules, as they have two names.
    atheris.instrument_all()
    run = asyncio.new_event_loop().run_until_complete  # one loop: a new one each time takes longer
    atheris.Setup([*sys.argv], lambda data: target.check(data, run))
    atheris.Fuzz()
