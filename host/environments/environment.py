"""A Python environment, and the command and variables that start a stub process in it."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import pb_utils
import stub.wire

_STUB = Path(stub.wire.__file__).parents[1]
_SHIMS = ("triton_python_backend_utils", "c_python_backend_utils")


class StubSources:
    """Creates symbolic links to the stub's packages in `folder`, which must exist and be empty.

    Interpreters of environments import the stub from there and not from the folder where it is
    installed: the host's packages beside it may be for another Python version. Raises OSError.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._with_packages: dict[tuple[str, ...], StubSources] = {}
        self.entry = folder / "stub" / "__main__.py"
        (folder / "stub").symlink_to(_STUB.resolve())
        api = Path(pb_utils.__file__).resolve().parent
        (folder / "pb_utils").symlink_to(api)
        for name in _SHIMS:
            (folder / name).symlink_to(api.parent / name)

    def add_packages(self, names: tuple[str, ...]) -> StubSources:
        """Returns sources, in a folder beside this one, that also have these packages of the host.

        They are compiled for the host's Python. Raises OSError.
        """
        sources = self._with_packages.get(names)
        if sources is None:
            folder = self._folder.with_name("_".join((self._folder.name, *names)))
            folder.mkdir()
            try:
                sources = StubSources(folder)
                for name in names:
                    spec = importlib.util.find_spec(name)
                    assert spec is not None and spec.origin is not None, "the host imports it"
                    (folder / name).symlink_to(Path(spec.origin).resolve().parent)
            except OSError:
                shutil.rmtree(folder, ignore_errors=True)  # the next load tries again
                raise
            self._with_packages[names] = sources
        return sources


@dataclass(frozen=True)
class Environment:
    """A venv or an unpacked conda environment in the folder `root`.

    Its stubs import the stub's code from `sources`. The owner calls `release` once, when it starts
    no more stubs in this environment.
    """

    root: Path
    sources: StubSources
    release: Callable[[], None] = lambda: None

    @property
    def python(self) -> Path:
        """The path of its interpreter."""
        return self.root / "bin" / "python"

    @property
    def stub(self) -> list[str]:
        """The command that starts a stub, without the stub's arguments."""
        return [str(self.python), str(self.sources.entry)]

    def variables(self, host: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of its processes, made from those of the host.

        The rules are in docs/reference/model-api.md, "Parameters that the server reads".
        """
        variables = dict(host)
        variables.pop("PYTHONHOME", None)
        variables["VIRTUAL_ENV"] = str(self.root)
        variables["VIRTUAL_ENV_PROMPT"] = f"({self.root})"
        variables["PATH"] = _prepend_path(self.root / "bin", host.get("PATH"))
        variables["LD_LIBRARY_PATH"] = _prepend_path(self.root / "lib", host.get("LD_LIBRARY_PATH"))
        return variables


def _prepend_path(first: Path, paths: str | None) -> str:
    """Prepends to a search path. An empty entry would mean the working directory."""
    return f"{first}:{paths}" if paths else str(first)
