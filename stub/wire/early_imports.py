"""Imports what host and stubs need, before a module of the user can take its name."""

import importlib
import os
import sys
from typing import Tuple

from stub.wire.paths import absolute_path


def import_dependencies(names: Tuple[str, ...] = ("msgspec", "zmq")) -> None:
    """Imports the libraries of the wire, with the folders of PYTHONPATH out of the way.

    A `zmq.py` of the user may lie there. Libraries that lie there themselves are imported later.
    """
    own = os.environ.get("PYTHONPATH", "").split(os.pathsep)
    user_path = {_normalize(folder) for folder in own if folder}
    path = sys.path[:]
    sys.path[:] = [folder for folder in path if _normalize(folder) not in user_path]
    try:
        for name in names:
            importlib.import_module(name)
    except ImportError:
        pass  # the next import of it uses the whole path
    finally:
        sys.path[:] = path


def _normalize(folder: str) -> str:
    return os.path.normpath(absolute_path(folder))
