"""A folder with what a stub is made of and nothing else, for interpreters that are not ours."""

from __future__ import annotations

from pathlib import Path

import pb_utils
import stub.wire

_STUB = Path(stub.wire.__file__).parents[1]
_SHIMS = ("triton_python_backend_utils", "c_python_backend_utils")


class StubSources:
    """Links in `folder`, which must exist.

    Where this project is installed, the host's other packages lie beside it; a Python of another
    version must not see them. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self.entry = folder / "stub" / "__main__.py"
        (folder / "stub").symlink_to(_STUB.resolve())
        api = Path(pb_utils.__file__).resolve().parent
        (folder / "pb_utils").symlink_to(api)
        for name in _SHIMS:
            (folder / name).symlink_to(api.parent / name)
