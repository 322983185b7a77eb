"""Takes rights from a frontend process that it does not need: it parses what clients send.

Landlock limits the files that it may open, and seccomp forbids it to start processes. Source: the
kernel's Documentation/userspace-api/landlock.rst and seccomp_filter.rst.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import struct
import sysconfig
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

_PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS, _SECCOMP_MODE_FILTER = 22, 38, 2
_LANDLOCK_CREATE_RULESET, _LANDLOCK_ADD_RULE, _LANDLOCK_RESTRICT_SELF = 444, 445, 446
_LANDLOCK_VERSION_FLAG, _LANDLOCK_RULE_PATH_BENEATH = 1, 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15}  # the number of rights on files, by version
_READ_FILE, _READ_DIR = 1 << 2, 1 << 3

_LOAD, _EQUAL, _GREATER_OR_EQUAL, _BITS_SET, _RETURN = 0x20, 0x15, 0x35, 0x45, 0x06  # of BPF
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_NUMBER, _ARCHITECTURE, _FIRST_ARGUMENT = 0, 4, 16  # offsets in seccomp_data
_CLONE_THREAD = 0x00010000
_X32 = 0x40000000


@dataclass(frozen=True)
class _Machine:
    """The number of an architecture, and of its system calls that start a process."""

    audit: int
    refused: tuple[int, ...]  # execve, execveat, fork, vfork
    clone: int


_CLONE3 = 435
_MACHINES = {
    "x86_64": _Machine(0xC000003E, (59, 322, 57, 58), 56),
    "aarch64": _Machine(0xC00000B7, (221, 281), 220),
}


class _Program(ctypes.Structure):
    """The `sock_fprog` of the kernel."""

    _fields_ = [("length", ctypes.c_ushort), ("code", ctypes.c_char_p)]


def restrict_process(readable: Iterable[Path]) -> list[str]:
    """Lets the process open only what it has open, its own code and `readable`, and only to read.

    It may start no process either. Returns what the kernel does not support. Threads that run
    already are not restricted.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    missing: list[str] = []
    if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0):
        return ["limits on files and processes"]
    if not _restrict_files(libc, [*_code_directories(), *readable]):
        missing.append("a limit on the files that it may open (Landlock)")
    if not _forbid_processes(libc):
        missing.append("a ban on starting processes (seccomp)")
    return missing


def _code_directories() -> list[Path]:
    """The directories of Python, of installed packages, and of this project."""
    paths = sysconfig.get_paths()
    installed = {Path(paths[name]) for name in ("stdlib", "platstdlib", "purelib", "platlib")}
    root = Path(__file__).resolve().parents[2]
    return [*installed, *(root / package for package in ("host", "stub", "pb_utils"))]


def _restrict_files(libc: ctypes.CDLL, readable: Iterable[Path]) -> bool:
    version = libc.syscall(_LANDLOCK_CREATE_RULESET, None, 0, _LANDLOCK_VERSION_FLAG)
    if version < 1:
        return False
    rights = (1 << _FILE_RIGHTS[min(version, max(_FILE_RIGHTS))]) - 1
    attributes = struct.pack("<Q", rights)
    ruleset = libc.syscall(_LANDLOCK_CREATE_RULESET, attributes, len(attributes), 0)
    if ruleset < 0:
        return False
    try:
        for path in readable:
            with suppress(OSError):  # what does not exist cannot be read
                descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
                try:
                    rule = struct.pack("<Qi", _READ_FILE | _READ_DIR, descriptor)
                    libc.syscall(_LANDLOCK_ADD_RULE, ruleset, _LANDLOCK_RULE_PATH_BENEATH, rule, 0)
                finally:
                    os.close(descriptor)
        return bool(libc.syscall(_LANDLOCK_RESTRICT_SELF, ruleset, 0) == 0)
    finally:
        os.close(ruleset)


def _forbid_processes(libc: ctypes.CDLL) -> bool:
    machine = _MACHINES.get(platform.machine())
    if machine is None:
        return False
    code = _filter(machine)
    program = _Program(len(code) // 8, code)
    return bool(libc.prctl(_PR_SET_SECCOMP, _SECCOMP_MODE_FILTER, ctypes.byref(program)) == 0)


def _filter(machine: _Machine) -> bytes:
    """A BPF program: threads may be started, and everything else that starts a process fails."""
    refuse, allow = _ERRNO | errno.EPERM, _ALLOW
    steps: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCHITECTURE),
        (_EQUAL, 1, 0, machine.audit),
        (_RETURN, 0, 0, refuse),
        (_LOAD, 0, 0, _NUMBER),
        (_GREATER_OR_EQUAL, 0, 1, _X32),
        (_RETURN, 0, 0, refuse),
    ]
    for number in machine.refused:
        steps += [(_EQUAL, 0, 1, number), (_RETURN, 0, 0, refuse)]
    steps += [
        (_EQUAL, 0, 1, _CLONE3),  # its flags are in memory; the C library calls clone then
        (_RETURN, 0, 0, _ERRNO | errno.ENOSYS),
        (_EQUAL, 1, 0, machine.clone),
        (_RETURN, 0, 0, allow),
        (_LOAD, 0, 0, _FIRST_ARGUMENT),
        (_BITS_SET, 0, 1, _CLONE_THREAD),
        (_RETURN, 0, 0, allow),
        (_RETURN, 0, 0, refuse),
    ]
    return b"".join(struct.pack("<HBBI", *step) for step in steps)
