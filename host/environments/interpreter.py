"""Checks whether the Python interpreter of an environment can run a stub."""

from __future__ import annotations

import json
import os

from host.environments.environment import Environment
from host.environments.program import ProgramError, run_program
from host.errors import internal

MIN_PYTHON = (3, 8)
"""The oldest CPython version that can run stubs."""

REQUIRED_PACKAGES = {"numpy": "numpy", "zmq": "pyzmq", "msgspec": "msgspec"}
"""The packages that a stub imports: import names and names for pip."""

# Valid syntax in every Python version, so that an old version can be reported.
_PROBE_SCRIPT = """\
import sys
sys.path[:] = [path for path in sys.path if path]
import json, platform
broken = {}
if sys.version_info >= (3,):
    for name in sys.argv[1:]:
        try:
            __import__(name)
        except BaseException as error:  # a package may raise anything, SystemExit too
            absent = isinstance(error, ImportError) and getattr(error, "name", "") == name
            broken[name] = None if absent else "%s: %s" % (type(error).__name__, error)
found = [platform.python_implementation(), list(sys.version_info[:3]), broken]
print("pbhost " + json.dumps(found))
"""


async def check_interpreter(environment: Environment, seconds: float, advice: str) -> None:
    """Raise HostError INTERNAL if stubs cannot run in the environment.

    `seconds` is the time limit. `advice` is the end of the error about missing packages; it may
    have the fields `{packages}`, and `{pip}` for the command that installs them.
    """
    root = environment.root
    if not environment.python.exists():
        raise internal(f"The Python environment {root} has no interpreter at bin/python.")
    try:
        output = await run_program(
            [environment.python, "-c", _PROBE_SCRIPT, *REQUIRED_PACKAGES],
            timeout_s=seconds,
            variables=environment.variables(os.environ),
        )
        implementation, version, broken = _parse_output(output)
    except ProgramError as failure:
        raise internal(
            f"The Python environment {root} does not work: {failure.details}"
        ) from failure
    number = ".".join(map(str, version))
    if implementation != "CPython" or tuple(version) < MIN_PYTHON:
        raise internal(
            f"The Python environment {root} has {implementation} {number}, but a model needs"
            f" CPython {MIN_PYTHON[0]}.{MIN_PYTHON[1]} or later."
        )
    missing = [REQUIRED_PACKAGES[name] for name, reason in broken.items() if reason is None]
    if missing:
        packages = " ".join(missing)
        pip = f"{environment.python} -m pip install {packages}"
        raise internal(
            f"The Python environment {root} (CPython {number}) lacks {', '.join(missing)}, which"
            f" a model's process needs. {advice.format(pip=pip, packages=packages)}"
        )
    for name, reason in broken.items():
        raise internal(
            f"The Python environment {root} (CPython {number}) has a {REQUIRED_PACKAGES[name]} that"
            f" cannot be imported: {reason}"
        )


def _parse_output(output: list[str]) -> tuple[str, list[int], dict[str, str | None]]:
    for line in reversed(output):
        if line.startswith("pbhost "):
            implementation, version, broken = json.loads(line.removeprefix("pbhost "))
            return implementation, version, broken
    raise ProgramError("its Python printed no result", output)
