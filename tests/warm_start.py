"""Hosts, and other commands, as forks of a process that has imported them already.

The imports are three quarters of the CPU time of a start, which many hundred tests pay for. A fork
has the arguments, the folder, the environment and the standard streams of a process that is started
by its command line; from there on, it runs the same code.

A host's fork server and frontend processes are forks of the host in the same way. They are made
while it has one thread and no descriptors, and wait until it starts such a program.
"""

from __future__ import annotations

import atexit
import ctypes
import fcntl
import gc
import importlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import Any

import setproctitle

_LARGEST_REQUEST = 1 << 20
_READ_AT_START = (
    *("PYTHON", "LD_", "LC_", "LANG", "GLIBC_", "MALLOC_", "OPENBLAS_", "OMP_", "GRPC_"),
    *("PBHOST_LANE", "TZ"),
)
"""How variables begin that count only while an interpreter starts or a library is imported."""


class ForkedCommand:
    """The process of a command, with the methods of `subprocess.Popen` that tests use."""

    def __init__(self, starter: CommandStarter, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._starter = starter
        self._pidfd = os.pidfd_open(pid)
        self._lock = threading.Lock()

    def poll(self) -> int | None:
        """The exit status, or minus the signal, if it has ended."""
        with suppress(subprocess.TimeoutExpired):
            return self.wait(0)
        return None

    def wait(self, timeout: float | None = None) -> int:
        """The exit status once it has ended."""
        with self._lock:
            if self.returncode is None:
                ended = select.poll()
                ended.register(self._pidfd, select.POLLIN)
                if not ended.poll(None if timeout is None else timeout * 1000):
                    raise subprocess.TimeoutExpired("pbhost", timeout or 0.0)
                self.returncode = self._starter.take_status(self.pid)
                os.close(self._pidfd)
            return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Ends it as a service manager does."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends it at once."""
        self.send_signal(signal.SIGKILL)


class CommandStarter:
    """The process that forks commands; it starts with the first of them."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._environment = dict(os.environ)
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def start(
        self, arguments: Sequence[str], env: Mapping[str, str], *streams: int
    ) -> ForkedCommand:
        """Forks a command; `streams` are the descriptors of its standard streams."""
        if self._process is None:
            self._launch()
        request = {"arguments": list(arguments), "directory": os.getcwd(), "environment": dict(env)}
        return ForkedCommand(self, self._ask(request, *streams))

    def suits(self, env: Mapping[str, str]) -> bool:
        """Whether a fork behaves as a new interpreter does in this environment."""
        changed = {name for name, _ in env.items() ^ self._environment.items()}
        return not any(name.startswith(_READ_AT_START) for name in changed)

    def take_status(self, pid: int) -> int:
        """The exit status of a command that has ended, which is told once."""
        status: int = self._ask({"pid": pid})
        return status

    def close(self) -> None:
        """Ends the process; hosts that run go on."""
        if self._process is not None and self._socket is not None:
            self._socket.close()
            self._process.wait()

    def _launch(self) -> None:
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._socket = ours
        with its:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm_start", str(its.fileno())],
                env=self._environment,
                cwd=os.path.dirname(os.path.dirname(os.path.abspath(__file__))),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[its.fileno()],
            )

    def _ask(self, request: Mapping[str, object], *descriptors: int) -> Any:
        assert self._socket is not None
        with self._lock:
            socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
            answer = self._socket.recv(_LARGEST_REQUEST)
        assert answer, "the process that forks hosts has ended"
        return json.loads(answer)


def _fork_for_requests(requests: socket.socket) -> dict[str, Any]:
    """Answers requests; returns one in each fork, which is to serve it."""
    while True:
        data, descriptors, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, 3)
        if not data:
            sys.exit()
        request: dict[str, Any] = json.loads(data)
        if "pid" in request:
            _, status = os.waitpid(request["pid"], 0)
            answer = os.waitstatus_to_exitcode(status)
        else:
            answer = os.fork()
            if answer == 0:
                for number, descriptor in enumerate(descriptors):
                    os.dup2(descriptor, number)
                    os.close(descriptor)
                requests.close()
                return request
            for descriptor in descriptors:
                os.close(descriptor)
        requests.send(json.dumps(answer).encode())


_ROOT = Path(__file__).resolve().parents[1]
_FORK_SERVER = str(_ROOT / "stub" / "__main__.py")
_FRONTEND = str(_ROOT / "host" / "frontend_processes" / "__main__.py")
_MOST_DESCRIPTORS = 64  # that such a program inherits


_OWN_PACKAGES = (
    "c_python_backend_utils",
    "host",
    "pb_utils",
    "pbhost",
    "stub",
    "tests",
    "triton_python_backend_utils",
)


def _own_modules() -> dict[str, ModuleType]:
    return {
        name: module
        for name, module in sys.modules.items()
        if name.partition(".")[0] in _OWN_PACKAGES
    }


class _StubModules:
    """What a fork server has imported; a host imports the same modules under other names."""

    def __init__(self) -> None:
        sys.path.insert(0, str(_ROOT))
        importlib.import_module("stub.fork_server")
        del sys.path[0]
        self._finders = sys.meta_path[:]
        self._modules = _own_modules()
        _forget_own_modules()

    def restore(self) -> None:
        """Undoes what was imported since."""
        sys.meta_path[:] = self._finders
        _forget_own_modules()
        sys.modules.update(self._modules)


def _forget_own_modules() -> None:
    for name in _own_modules():
        del sys.modules[name]


class _WaitingProgram(subprocess.Popen[bytes]):
    """A fork that waits, and then runs a Python program as a new interpreter would."""

    def __init__(self, path: str, prepare: Callable[[], None]) -> None:
        """`path`: of the program, which runs after `prepare`."""
        self._requests, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.args = path
        self.returncode = None
        self.stdin = self.stdout = self.stderr = None
        self._waitpid_lock = threading.Lock()
        self.pid = os.fork()
        if self.pid == 0:
            self._requests.close()
            _run_program(path, its, prepare)
        its.close()
        self._child_created = True

    def run(self, arguments: Sequence[str], inherited: Sequence[int]) -> None:
        """Makes it run the program with these descriptors, under the same numbers."""
        request = json.dumps([arguments, list(inherited), dict(os.environ)]).encode()
        with self._requests:
            socket.send_fds(self._requests, [request], inherited)


def _run_program(path: str, requests: socket.socket, prepare: Callable[[], None]) -> None:
    """Waits for the request, and runs the program; does not return."""
    prepare()
    importlib.import_module("stub.process").kill_with_parent()
    data, received, _, _ = socket.recv_fds(requests, _LARGEST_REQUEST, _MOST_DESCRIPTORS)
    if not data:
        os._exit(0)  # the host has ended
    arguments, numbers, environment = json.loads(data)
    _renumber_descriptors(received, numbers)
    requests.detach()
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.close(output)
    os.environ.clear()
    os.environ.update(environment)
    program = ModuleType("__main__")
    program.__file__ = path
    sys.modules["__main__"] = program
    sys.argv[:] = [path, *arguments]
    sys.path.insert(0, os.path.dirname(path))
    exec(compile(Path(path).read_bytes(), path, "exec"), vars(program))
    sys.exit()


def _renumber_descriptors(received: Sequence[int], numbers: Sequence[int]) -> None:
    """Gives descriptors these numbers, and closes all others but the standard streams."""
    above = max((*received, *numbers, 2)) + 1
    moved = [fcntl.fcntl(each, fcntl.F_DUPFD, above) for each in received]
    os.closerange(3, above)
    for each, number in zip(moved, numbers, strict=True):
        os.dup2(each, number)
    os.closerange(above, max((*moved, above)) + 1)


def _fork_programs(arguments: Sequence[str], stub_modules: _StubModules) -> None:
    """Forks the programs that a host with these flags starts, and makes it take them."""
    spawner = importlib.import_module("pbhost.host.instances.launchers").InterpreterSpawner
    start_interpreter = spawner._popen
    flags = {name: value for name, _, value in (each.partition("=") for each in arguments)}
    waiting = []
    if flags.get("--stub-start") != "spawn":
        waiting.append(_WaitingProgram(_FORK_SERVER, stub_modules.restore))
    frontends = flags.get("--frontend-processes", "")
    if frontends in ("1", "2"):
        waiting += [_WaitingProgram(_FRONTEND, lambda: None) for _ in range(int(frontends))]

    async def take_or_start(
        self: object,
        command: Sequence[str],
        inherited: Sequence[int],
        stdout: int,
        stderr: int | None,
        variables: Mapping[str, str] | None = None,
    ) -> subprocess.Popen[bytes]:
        if stdout == subprocess.DEVNULL and stderr is None and variables is None:
            for program in waiting:
                if command[0] == sys.executable and command[1] == program.args:
                    waiting.remove(program)
                    program.run(command[2:], inherited)
                    return program
        started: subprocess.Popen[bytes] = await start_interpreter(
            self, command, inherited, stdout, stderr, variables
        )
        return started

    spawner._popen = take_or_start


def _keep_modules_at_exit() -> None:
    """Makes the end of this process and its forks pass over the modules that it has by now.

    To clear them would copy the pages that it shares with its parent.
    """
    kept = list(sys.modules.items())
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))  # for good

    def forget() -> None:
        for name, module in kept:
            if sys.modules.get(name) is module and name not in sys.builtin_module_names:
                del sys.modules[name]

    atexit.register(forget)


def main() -> None:
    """Imports what commands and the programs of a host need, and forks for each request."""
    del sys.path[0]  # as `python -m pbhost` does
    setproctitle.getproctitle()  # finds the title, which is not possible in another environment
    stub_modules = _StubModules()
    command = importlib.import_module("pbhost.host.__main__")
    importlib.import_module("pbhost.host.frontend_processes.frontend_process")
    for name in ("serve", "infer", "chat", "models", "wait", "replay", "record", "top", "crashes"):
        importlib.import_module(f"pbhost.host.cli.{name}")
    gc.freeze()  # a collection in a fork would write to these pages, and so copy them
    request = _fork_for_requests(socket.socket(fileno=int(sys.argv[1])))
    _keep_modules_at_exit()
    os.chdir(request["directory"])
    os.environ.clear()
    os.environ.update(request["environment"])
    if request["arguments"][:1] == ["serve"]:
        _fork_programs(request["arguments"], stub_modules)
    sys.argv[1:] = request["arguments"]
    command.main()


if __name__ == "__main__":
    main()
