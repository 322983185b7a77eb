"""`pbhost doctor`: prints what a report of a problem needs to say about this machine."""

from __future__ import annotations

import asyncio
import json
import os
import platform
import re
import resource
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import NoReturn

from host.cli.arguments import NoOptions, format_flag, parse_texts
from host.core import VERSION
from host.instances.gpus import find_gpus
from host.options.flags import FlagGroup
from host.options.options import Options
from host.release import RELEASE
from host.system.resources import usable_cpus

_MIN_FILES = 4096
_MIN_SHARED_MEMORY = 256 << 20
_SECRET = re.compile(
    r"KEY|SECRET|TOKEN|PASS|CREDENTIAL|RESTRICTED|HEADER|REDIS|_CONFIG|PBHOST_SET$", re.I
)
_USER = re.compile(r"//\S*@")  # of a URL, with the password
_VARIABLES = re.compile(
    r"PBHOST_|CUDA_|NVIDIA_|OMP_|MKL_|MALLOC_|GRPC_|OTEL_|PYTHON|RAY_|LD_(PRELOAD|LIBRARY_PATH)|TMPDIR"
)
_LIMITS = {
    "open files": resource.RLIMIT_NOFILE,
    "processes": resource.RLIMIT_NPROC,
    "locked memory": resource.RLIMIT_MEMLOCK,
    "address space": resource.RLIMIT_AS,
    "core files": resource.RLIMIT_CORE,
}
_DISTRIBUTIONS = ("/usr/bin/", "/usr/libexec/")

_ABOUT = """\
Prints versions, limits, devices, shared memory and the build of the Python interpreter, for the
report of a problem. Values of variables that may be secrets are left out. Nothing is sent anywhere.

exit status: 0 the text is printed, also if it has advice; 2 the command line is invalid"""

_group = FlagGroup("Doctor")


@dataclass
class DoctorOptions:
    """The flags of `pbhost doctor`."""

    format: str = format_flag(_group)


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints what was found and exits."""
    _, options = parse_texts(arguments, "doctor", _ABOUT, DoctorOptions)
    sections = {
        "pbhost": _versions(),
        "python": _python(),
        "machine": _machine(),
        "limits": dict(_limits()),
        "packages": _packages(),
        "variables": _variables(),
    }
    advice = list(_advice())
    if options.format == "json":
        sys.stdout.write(json.dumps({**sections, "advice": advice}, indent=2) + "\n")
        sys.exit(0)
    for title, values in sections.items():
        sys.stdout.write(f"{title}\n")
        sys.stdout.writelines(f"  {name}: {value}\n" for name, value in values.items())
    sys.stdout.writelines(["advice\n", *(f"  {text}\n" for text in advice or ["none"])])
    sys.exit(0)


def _versions() -> dict[str, str]:
    return {
        "version": RELEASE,
        "as Triton": VERSION,
        "installed in": str(Path(__file__).parents[2]),
    }


def _python() -> dict[str, str]:
    return {
        "version": " ".join(sys.version.split()),
        "executable": sys.executable,
        "profile-guided optimisation": _optimisation(),
        "debug build": _yes(bool(sysconfig.get_config_var("Py_DEBUG"))),
        "free-threaded": _yes(bool(sysconfig.get_config_var("Py_GIL_DISABLED"))),
    }


def _optimisation() -> str:
    """Whether Python was built with a profile: yes, no, or probably, if it says nothing."""
    if "--enable-optimizations" in str(sysconfig.get_config_var("CONFIG_ARGS")):
        return "yes"
    # Distributions build with `make profile-opt`, which leaves no trace.
    if os.path.realpath(sys.executable).startswith(_DISTRIBUTIONS):
        return "probably: it is the Python of the system"
    return "no"


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def _machine() -> dict[str, str]:
    system = os.uname()
    memory = os.statvfs("/dev/shm") if os.path.isdir("/dev/shm") else None
    found = {
        "system": _distribution(),
        "kernel": f"{system.sysname} {system.release} {system.machine}",
        "C library": " ".join(platform.libc_ver()),
        "CPUs": f"{usable_cpus():g} of {os.cpu_count()}",
        "memory": _field("/proc/meminfo", "MemTotal"),
        "/dev/shm": "missing"
        if memory is None
        else f"{memory.f_bavail * memory.f_frsize >> 20} MiB free of"
        f" {memory.f_blocks * memory.f_frsize >> 20} MiB",
        "memfd": _yes(hasattr(os, "memfd_create")),
        "process 1": _first_line("/proc/1/comm"),
        "NVIDIA driver": _first_line("/proc/driver/nvidia/version"),
    }
    gpus = asyncio.run(find_gpus(Options().min_supported_compute_capability))
    found["usable GPUs"] = ", ".join(map(str, gpus)) or "none"
    return found


def _distribution() -> str:
    try:
        return platform.freedesktop_os_release().get("PRETTY_NAME", "unknown")
    except OSError:
        return "unknown"


def _first_line(path: str) -> str:
    try:
        return Path(path).read_text().partition("\n")[0]
    except OSError:
        return "none"


def _field(path: str, name: str) -> str:
    try:
        text = Path(path).read_text()
    except OSError:
        return "unknown"
    found = re.search(rf"^{name}:\s+(.+)$", text, re.MULTILINE)
    return found[1] if found else "unknown"


def _limits() -> Iterator[tuple[str, str]]:
    for name, number in _LIMITS.items():
        soft, hard = (
            "unlimited" if value == resource.RLIM_INFINITY else str(value)
            for value in resource.getrlimit(number)
        )
        yield name, soft if soft == hard else f"{soft}, at most {hard}"


def _packages() -> dict[str, str]:
    """The versions of what pbhost needs or can use."""
    try:
        needed = requires("pbhost") or []
    except PackageNotFoundError:
        return {}
    names = sorted({re.split(r"[^A-Za-z0-9_.-]", line)[0] for line in needed if "test" not in line})
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def _variables() -> dict[str, str]:
    return {
        name: "(left out)"
        if _SECRET.search(name) or _SECRET.search(value)
        else _USER.sub("//(left out)@", value)
        for name, value in sorted(os.environ.items())
        if _VARIABLES.match(name)
    }


def _advice() -> Iterator[str]:
    if _optimisation() == "no":
        yield (
            "This Python was built without profile-guided optimisation, which costs 7 to 20 % of"
            " the speed: use one of a distribution or of an official image, or build it with"
            " --enable-optimizations"
        )
    if sysconfig.get_config_var("Py_DEBUG"):
        yield "This is a debug build of Python, which is several times slower"
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)
    if files != resource.RLIM_INFINITY and files < _MIN_FILES:
        yield f"At most {files} files can be open; a stub needs about ten: raise ulimit -n"
    if os.path.isdir("/dev/shm"):
        memory = os.statvfs("/dev/shm")
        if memory.f_blocks * memory.f_frsize < _MIN_SHARED_MEMORY:
            yield (
                "/dev/shm is small, which limits the shared memory of clients: give a container"
                " more with --shm-size=1g"
            )


def print_version(arguments: Sequence[str]) -> NoReturn:
    """Runs `pbhost version`: prints the versions of pbhost and of the Triton that it stands for."""
    about = "Print the version of pbhost, and the version of Triton that it tells clients."
    parse_texts(arguments, "version", about, NoOptions)
    sys.stdout.write(f"pbhost {RELEASE} (as Triton {VERSION})\n")
    sys.exit(0)
