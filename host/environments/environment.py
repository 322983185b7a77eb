"""A Python environment: the command that starts a stub in it, and checks of its interpreter."""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import pb_utils
import stub.wire
from host.environments.program import ProgramError, run_program
from host.errors import internal

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

        The rules are in docs/reference/model-processes.md, "Parameters that the server reads".
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


MIN_PYTHON = (3, 8)
"""The oldest CPython version that can run stubs."""

REQUIRED_PACKAGES = {"numpy": "numpy", "zmq": "pyzmq", "msgspec": "msgspec"}
"""The packages that a stub imports: import names and names for pip."""

_LENDABLE = {"zmq", "msgspec"}
"""Those of them that models do not use, as a rule, so their versions do not matter to a model."""

# Valid syntax in every Python version, so that an old version can be reported.
_PROBE_SCRIPT = """\
import sys
sys.path[:] = [path for path in sys.path if path]
import json, platform, sysconfig
if sys.argv[1]:
    sys.path.insert(0, sys.argv[1])
broken = {}
if sys.version_info >= (3,):
    for name in sys.argv[2:]:
        try:
            __import__(name)
        except BaseException as error:  # a package may raise anything, SystemExit too
            absent = isinstance(error, ImportError) and getattr(error, "name", "") == name
            broken[name] = None if absent else "%s: %s" % (type(error).__name__, error)
abi = sysconfig.get_config_var("SOABI")
found = [platform.python_implementation(), list(sys.version_info[:3]), abi, broken]
print("pbhost " + json.dumps(found))
"""


@dataclass(frozen=True)
class _Probe:
    implementation: str
    version: tuple[int, ...]
    abi: str | None
    broken: dict[str, str | None]
    """Packages that cannot be imported, with the error, or None if they are absent."""


async def check_interpreter(environment: Environment, seconds: float, advice: str) -> Environment:
    """Raises HostError INTERNAL if stubs cannot run in the environment.

    An environment that was packed for Triton has no pyzmq and no msgspec. If its Python has the
    binary interface of the host's, the returned environment uses the host's packages instead.

    `seconds` is the time limit. `advice` is the end of the error about missing packages; it may
    have the fields `{packages}`, and `{pip}` for the command that installs them.
    """
    root = environment.root
    if not environment.python.exists():
        raise internal(f"The Python environment {root} has no interpreter at bin/python.")
    try:
        probe = await _probe(environment, seconds)
    except ProgramError as failure:
        raise internal(
            f"The Python environment {root} does not work: {failure.details}"
        ) from failure
    number = ".".join(map(str, probe.version))
    if probe.implementation != "CPython" or probe.version < MIN_PYTHON:
        raise internal(
            f"The Python environment {root} has {probe.implementation} {number}, but a model needs"
            f" CPython {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later."
        )
    absent = [name for name, reason in probe.broken.items() if reason is None]
    if absent and len(absent) == len(probe.broken):
        lent = await _lend_packages(environment, tuple(absent), probe.abi, seconds)
        if lent is not None:
            return lent
    if absent:
        missing = [REQUIRED_PACKAGES[name] for name in absent]
        packages = " ".join(missing)
        pip = f"{environment.python} -m pip install {packages}"
        raise internal(
            f"The Python environment {root} (CPython {number}) lacks {', '.join(missing)}, which"
            f" a model's process needs. {advice.format(pip=pip, packages=packages)}"
        )
    for name, reason in probe.broken.items():
        raise internal(
            f"The Python environment {root} (CPython {number}) has a {REQUIRED_PACKAGES[name]} that"
            f" cannot be imported: {reason}"
        )
    return environment


async def _lend_packages(
    environment: Environment, names: tuple[str, ...], abi: str | None, seconds: float
) -> Environment | None:
    """Returns the environment with these packages of the host, or None if it cannot use them.

    Raises HostError INTERNAL if no links to them can be made, for example on a full disk.
    """
    if not _LENDABLE.issuperset(names) or abi is None or abi != sysconfig.get_config_var("SOABI"):
        return None
    try:
        sources = environment.sources.add_packages(names)
    except OSError as error:
        packages = ", ".join(REQUIRED_PACKAGES[name] for name in names)
        raise internal(
            f"The Python environment {environment.root} lacks {packages}, and links to those of the"
            f" server cannot be made: {error}"
        ) from error
    lent = replace(environment, sources=sources)
    try:
        probe = await _probe(lent, seconds, sources.entry.parents[1])
    except ProgramError:  # the libraries of the environment may be too old for them
        return None
    return None if probe.broken else lent


async def _probe(environment: Environment, seconds: float, sources: Path | str = "") -> _Probe:
    """Asks the interpreter for its version and tries the imports, first from `sources`."""
    output = await run_program(
        [environment.python, "-c", _PROBE_SCRIPT, sources, *REQUIRED_PACKAGES],
        timeout_s=seconds,
        variables=environment.variables(os.environ),
    )
    return _parse_output(output)


def _parse_output(output: list[str]) -> _Probe:
    for line in reversed(output):
        if line.startswith("pbhost "):
            implementation, version, abi, broken = json.loads(line.removeprefix("pbhost "))
            return _Probe(implementation, tuple(version), abi, broken)
    raise ProgramError("its Python printed no result", output)
