"""Imports what host and stubs need, before a module of the user can take its name."""

import importlib
import os
import sys

from stub.wire.paths import absolute_path


def import_dependencies() -> None:
    """Imports the library of the wire, with the folders of PYTHONPATH out of the way.

    A `msgspec.py` of the user may lie there. If the library itself does, it is imported later.
    """
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user_path = {_normalize(folder) for folder in own if folder}
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if _normalize(folder) not in user_path]
    try:
        importlib.import_module("msgspec")
    except ImportError:
        pass  # the next import uses the whole path
    finally:
        sys.path[:] = path


def _normalize(folder: str) -> str:
    return os.path.normpath(absolute_path(folder))
