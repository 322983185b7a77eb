"""The worker processes of a load, as the command that measures sees them."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import msgspec

from host.errors import HostError, internal, unavailable
from host.load_generator.job import (
    TIMES,
    Command,
    Cut,
    Failed,
    Job,
    Measured,
    Report,
    Slice,
    Stop,
    Stopped,
    decode_report,
    encode,
)

_ENTRY = str(Path(__file__).with_name("__main__.py"))
_REPLY_SECONDS = 60.0
_KILL_SECONDS = 5.0


class Sample(Measured):
    """What all workers have measured in a part of the time.

    Attributes:
        seconds: the length of this time.
        cpu: for each worker the share of the time in which it had a CPU.
        busy: for each worker the share of the time in which it had a CPU or waited for one.
        began, finished: when the load began, and when all of its requests had ended, as in
            `job.Slice`.
    """

    def __init__(self) -> None:
        super().__init__()
        self.seconds = 0.0
        self.cpu: list[float] = []
        self.busy: list[float] = []
        self.backlog = 0
        self.began = self.finished = 0.0

    @classmethod
    def joined(cls, parts: Sequence[Sample]) -> Sample:
        """Returns one sample of times that follow each other."""
        whole = cls()
        for part in parts:
            whole.add(part)
            whole.seconds += part.seconds
            whole.backlog = part.backlog
            whole.began, whole.finished = part.began, part.finished
        if parts:
            whole.cpu = _weighted([one.cpu for one in parts], parts)
            whole.busy = _weighted([one.busy for one in parts], parts)
        return whole

    @property
    def ended(self) -> bool:
        """Whether all requests have ended, of a load with a number of them."""
        return self.finished > 0

    @property
    def rate(self) -> float:
        """Successful requests per second."""
        return len(self.latencies) / self.seconds if self.seconds else 0.0


def _weighted(shares: Sequence[Sequence[float]], parts: Sequence[Sample]) -> list[float]:
    """The share of each worker in the whole time."""
    whole = sum(part.seconds for part in parts) or 1.0
    columns = zip(*shares, strict=False)
    return [
        sum(share * part.seconds for share, part in zip(column, parts, strict=True)) / whole
        for column in columns
    ]


class _Process:
    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            os.set_inheritable(theirs.fileno(), True)
            # Ctrl-C is for the command: it then asks for what was measured.
            self.pid = os.posix_spawn(
                sys.executable,
                [sys.executable, _ENTRY, str(theirs.fileno())],
                os.environ,
                setsigmask=[signal.SIGINT],
            )
        self._connection = Connection(ours.detach())

    def send(self, command: Command) -> None:
        try:
            self._connection.send_bytes(encode(command))
        except OSError as error:
            raise internal("a process of the load generator has ended early") from error

    def receive(self) -> Report:
        """Returns the next report. Raises HostError."""
        if not self._connection.poll(_REPLY_SECONDS):
            raise internal(f"a process of the load generator did not respond in {_REPLY_SECONDS} s")
        try:
            report: Report = decode_report(self._connection.recv_bytes())
            return report
        except (EOFError, OSError, msgspec.MsgspecError) as error:
            raise internal("a process of the load generator has ended early") from error

    def receive_slice(self) -> Sample:
        """Returns a slice. Raises HostError."""
        report = self.receive()
        if isinstance(report, Failed):
            raise unavailable(report.error)
        assert isinstance(report, Slice)
        sample = Sample()
        sample.seconds = report.seconds
        for name in TIMES:
            getattr(sample, name).frombytes(getattr(report, name))
        sample.responses, sample.backlog = report.responses, report.backlog
        sample.failures, sample.messages = report.failures, report.messages
        sample.cpu = [report.cpu / report.seconds]
        sample.busy = [(report.cpu + report.waited) / report.seconds]
        sample.began, sample.finished = report.began, report.finished
        return sample

    def close(self) -> None:
        """Ends the process; it ends by itself when the connection is closed."""
        self._connection.close()
        reap_process(self.pid, _KILL_SECONDS)


def reap_process(pid: int, seconds: float) -> None:
    """Waits until a child process has ended, and kills it after this time."""
    end = time.monotonic() + seconds
    while os.waitpid(pid, os.WNOHANG)[0] == 0:
        if time.monotonic() > end:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
            return
        time.sleep(0.002)


class Workers:
    """Processes that carry out loads together, one load at a time."""

    def __init__(self) -> None:
        self._processes: list[_Process] = []
        self._active: list[_Process] = []

    def start(self, jobs: Sequence[Job]) -> None:
        """Starts a load: a job for each process. Raises HostError."""
        self.stop()
        while len(self._processes) < len(jobs):
            self._processes.append(_Process())
        self._active = self._processes[: len(jobs)]
        for process, job in zip(self._active, jobs, strict=True):
            process.send(job)

    def cut(self) -> Sample:
        """Returns what was measured since the last call. Raises HostError if no server answers."""
        try:
            for process in self._active:
                process.send(Cut())
            samples = [process.receive_slice() for process in self._active]
        except HostError:
            self.close()  # replies that are left would be taken for those of the next load
            raise
        whole = Sample()
        for sample in samples:
            whole.add(sample)
            whole.backlog += sample.backlog
            whole.cpu += sample.cpu
            whole.busy += sample.busy
        whole.seconds = sum(sample.seconds for sample in samples) / len(samples)
        whole.began = min(sample.began for sample in samples)
        if all(sample.ended for sample in samples):
            whole.finished = max(sample.finished for sample in samples)
        return whole

    def stop(self) -> None:
        """Ends the load, if there is one. The processes wait for another one. Raises HostError."""
        active, self._active = self._active, []
        try:
            for process in active:
                process.send(Stop())
            for process in active:
                while not isinstance(process.receive(), Stopped):
                    pass  # of a load that has failed by itself
        except HostError:
            self.close()
            raise

    def close(self) -> None:
        """Ends the processes."""
        processes, self._processes, self._active = self._processes, [], []
        for process in processes:
            process.close()

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()
