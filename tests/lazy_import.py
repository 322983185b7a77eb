"""Large libraries for tests, imported when first used.

Each worker imports all test modules, but runs only some of their tests.
"""

from __future__ import annotations

import importlib
import importlib.util
from typing import Any

import pytest


class LazyModule:
    """A module that is imported with the first look at one of its attributes."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "_mock_name":  # pytest asks each name of a module
            raise AttributeError(name)
        return getattr(importlib.import_module(self._name), name)


def lazy_import(name: str, *needed: str) -> Any:
    """The module `name`; skips the test module where it or another needed library is missing."""
    for library in (name.partition(".")[0], *needed):
        if importlib.util.find_spec(library) is None:
            pytest.skip(f"pip install {library}", allow_module_level=True)
    return LazyModule(name)
