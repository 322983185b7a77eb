"""A Python environment: what a process in it is started with."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from host.environments.sources import StubSources


@dataclass(frozen=True)
class Environment:
    """A venv or an unpacked conda environment in the folder `root`.

    Its stubs import this project from `sources`. Whoever has got this calls `release` once, when no
    stub is to start here any more.
    """

    root: Path
    sources: StubSources
    release: Callable[[], None] = lambda: None

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.root / "bin" / "python"

    @property
    def stub(self) -> list[str]:
        """The command that starts a stub, without arguments."""
        return [str(self.python), str(self.sources.entry)]

    def variables(self, host: Mapping[str, str]) -> dict[str, str]:
        """The environment variables of its processes, made from the host's (pb_utils spec 1.6)."""
        variables = dict(host)
        variables.pop("PYTHONHOME", None)
        variables["VIRTUAL_ENV"] = str(self.root)
        variables["VIRTUAL_ENV_PROMPT"] = f"({self.root})"
        variables["PATH"] = _prepend_path(self.root / "bin", host.get("PATH"))
        variables["LD_LIBRARY_PATH"] = _prepend_path(self.root / "lib", host.get("LD_LIBRARY_PATH"))
        return variables


def _prepend_path(first: Path, paths: str | None) -> str:
    """An empty entry would mean the working directory."""
    return f"{first}:{paths}" if paths else str(first)
