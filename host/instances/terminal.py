"""Stubs on the host's own terminal, where a debugger in their model can be used."""

from __future__ import annotations

import os
import signal
import sys
import termios
from typing import Any

from host.environments.environment import Environment
from host.instances.process import StubLaunch, StubProcess, stub_command
from stub.wire.spawn import SpawnArguments


class TerminalLauncher:
    """Starts stubs with the standard streams of the host, each as a new interpreter."""

    async def launch(self, stub: StubLaunch) -> StubProcess:
        """As `Launcher.launch`; output of the stub goes to the terminal."""
        modes = _terminal_modes()
        pid = _spawn_stub(stub.spawn, stub.environment)
        pidfd = _open_pidfd(pid)
        process = StubProcess(pid, pidfd, stub)

        def wait() -> int:
            _, status = os.waitpid(pid, 0)
            _restore_terminal(modes)
            return os.waitstatus_to_exitcode(status)

        process.reap_on_exit(wait)
        return process

    async def close(self) -> None:
        """As `Launcher.close`."""


def _spawn_stub(spawn: SpawnArguments, environment: Environment | None) -> int:
    """Starts a stub; returns its pid. Raises OSError."""
    program = stub_command(environment)
    return os.posix_spawn(
        program[0],
        [*program, spawn.dump()],
        os.environ if environment is None else environment.variables(os.environ),
        # Onto itself: that lets the child inherit it.
        file_actions=[(os.POSIX_SPAWN_DUP2, fd, fd) for fd in spawn.descriptors],
        setsid=True,  # Ctrl-C at the terminal is for the host alone
    )


def _open_pidfd(pid: int) -> int:
    """A pidfd of a child. Raises OSError; then the child is killed, as it cannot be watched."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        raise


def has_terminal() -> bool:
    """Whether stdin and stdout are a terminal."""
    return sys.stdin is not None and sys.stdin.isatty()


def _terminal_modes() -> list[Any] | None:
    """The modes of the terminal, if there is one."""
    return termios.tcgetattr(0) if has_terminal() else None


def _restore_terminal(modes: list[Any] | None) -> None:
    """Restores the terminal after a debugger was killed at its prompt, when echo is off."""
    if modes is None:
        return
    try:
        if _in_foreground():
            termios.tcsetattr(0, termios.TCSANOW, modes)
    except termios.error:
        pass  # the terminal was closed


def _in_foreground() -> bool:
    """Whether this process group may change the terminal."""
    try:
        return os.tcgetpgrp(0) == os.getpgrp()
    except OSError:
        return True  # not the controlling terminal: there is no job control
