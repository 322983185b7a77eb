"""Checks whether the Python interpreter of an environment can run a stub."""

from __future__ import annotations

import json
import os
import sysconfig
from dataclasses import dataclass, replace
from pathlib import Path

from host.environments.environment import Environment
from host.environments.program import ProgramError, run_program
from host.errors import internal

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
