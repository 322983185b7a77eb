"""The fork server: a process that has imported what stubs need, and forks into stubs.

Importing numpy and ZeroMQ takes most of the start-up time and memory of a stub; a forked stub has
both at once, and shares the memory. Modules of a user are only imported by a fork server of its
own for one model, which prepares it.
"""

import errno
import io
import os
import selectors
import signal
import socket
import sys
import warnings
from typing import Optional, TextIO

import stub.worker  # noqa: F401  (it is what the forks need)
from stub.preload import prepare_model
from stub.process import kill_with_parent, lead_process_group, set_title
from stub.user_model import ModelFailure
from stub.wire.heap import freeze_gc
from stub.wire.messages import PreloadJob
from stub.wire.spawn import (
    RequestRefused,
    SpawnArguments,
    receive_request,
    send_ended,
    send_prepared,
    send_refused,
    send_started,
)


def run_fork_server(descriptor: int, job: Optional[PreloadJob] = None) -> SpawnArguments:
    """Forks a stub for every request; returns the arguments of the stub in each stub.

    `job`: what is prepared before the first fork; the host is told when that is done. In the server
    itself it raises SystemExit when the host has closed its end.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    kill_with_parent()
    set_title("", "pbhost-fork-server")
    # The BLAS library ends its threads before a fork, and there are no other threads.
    warnings.filterwarnings("ignore", message=".*multi-threaded.*fork", category=DeprecationWarning)
    host = socket.socket(fileno=descriptor)
    if job is not None:
        _prepare(job, host)
    freeze_gc()  # a collection in a stub would write to these pages, and so copy them
    try:
        return _ForkServer(host).run()
    except (BrokenPipeError, ConnectionResetError):
        sys.exit(0)  # the host has closed its end before it was told of a stub


def _prepare(job: PreloadJob, host: socket.socket) -> None:
    """Prepares a model, or ends the process."""
    set_title(job.args["model_name"], "pbhost-preload")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # a line must not wait in a buffer for a fork
            stream.reconfigure(line_buffering=True, errors="backslashreplace")
    error = ""
    try:
        if not hasattr(socket, "recv_fds"):  # Python 3.8
            raise ModelFailure(
                "Python 3.8 cannot hand a stub its descriptors; set the parameter PRELOAD to 'no',"
                " and each instance calls preload itself"
            )
        prepare_model(job)
    except ModelFailure as failure:
        error = str(failure)
    send_prepared(host, error)
    if error:
        os._exit(1)  # threads of the model may not end


class _ForkServer:
    def __init__(self, host: socket.socket) -> None:
        self._host = host
        self._woken, self._waker = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)
        signal.set_wakeup_fd(self._waker, warn_on_full_buffer=False)

    def run(self) -> SpawnArguments:
        with selectors.DefaultSelector() as selector:
            selector.register(self._host, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = [key.fileobj for key, _ in selector.select()]
                if self._woken in ready:
                    os.read(self._woken, 4096)
                    self._reap_stubs()
                if self._host in ready:
                    spawn = self._fork_stub()
                    if spawn is not None:
                        return spawn

    def _fork_stub(self) -> Optional[SpawnArguments]:
        """Forks the next stub; returns its arguments in the child, and None in the server."""
        try:
            request = receive_request(self._host)
        except RequestRefused:
            return None
        if request is None:
            sys.exit(0)
        spawn, stdout, stderr = request
        pid = 0
        try:
            pid = os.fork()
            if pid == 0:
                self._become_stub(stdout, stderr)
                return spawn
            pidfd = os.pidfd_open(pid)
        except OSError as error:
            # No more processes or descriptors. If this process ended, so would all of its stubs.
            if pid:
                os.kill(pid, signal.SIGKILL)
            send_refused(self._host, spawn.token, error.errno or errno.EIO)
        else:
            send_started(self._host, spawn.token, pid, pidfd)
            os.close(pidfd)
        for descriptor in (*spawn.descriptors, stdout, stderr):
            os.close(descriptor)
        return None

    def _become_stub(self, stdout: int, stderr: int) -> None:
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for descriptor in (self._host.detach(), self._woken, self._waker):
            os.close(descriptor)
        lead_process_group()
        for pipe, number, name in ((stdout, 1, "stdout"), (stderr, 2, "stderr")):
            os.dup2(pipe, number)
            os.close(pipe)
            setattr(sys, name, _open_stream(number, getattr(sys, name)))
        torch = sys.modules.get("torch")  # a model may have imported it in `preload`
        if torch is not None:
            torch.seed()
        random = sys.modules.get("numpy.random")
        if random is not None:
            random.seed()  # as Python does with its own; else all stubs would draw the same numbers

    def _reap_stubs(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            send_ended(self._host, pid, os.waitstatus_to_exitcode(status))


def _open_stream(descriptor: int, before: Optional[TextIO]) -> TextIO:
    """Opens a standard stream again: the old object has cached properties of the old file."""
    encoding = before.encoding if before is not None else "utf-8"
    return open(descriptor, "w", encoding=encoding, errors="backslashreplace", closefd=False)
