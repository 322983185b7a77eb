"""The start of a stub: its arguments, and the messages between the host and its fork server."""

import errno
import json
import os
import socket
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Dict, Optional, Sequence, Tuple, Type, TypeVar

NO_THREADS_STATUS = 75  # EX_TEMPFAIL
"""Exit status of a stub that cannot start its threads."""

_Arguments = TypeVar("_Arguments", bound="ProcessArguments")


@dataclass(frozen=True)
class ProcessArguments:
    """What a new process gets as JSON in its only command-line argument.

    It inherits the descriptors in the fields `DESCRIPTORS`; -1 is none.
    """

    DESCRIPTORS: ClassVar[Tuple[str, ...]] = ()

    @property
    def descriptors(self) -> Tuple[int, ...]:
        """The descriptors that the process inherits."""
        known: Tuple[int, ...] = tuple(getattr(self, name) for name in self.DESCRIPTORS)
        return tuple(descriptor for descriptor in known if descriptor >= 0)

    def dump(self) -> str:
        """Returns the command-line argument."""
        return json.dumps(asdict(self))

    @classmethod
    def load(cls: Type[_Arguments], text: str) -> _Arguments:
        """Parses the command-line argument."""
        return cls(**json.loads(text))


@dataclass(frozen=True)
class SpawnArguments(ProcessArguments):
    """The arguments of a new stub.

    Limits are in bytes. `lifeline_fd` is closed when the host ends. `rings_fd` holds the ring of
    work to the stub, the ring to the host, and the ring of BLS responses to the stub; the eventfds
    count their records. With `report_imports`, the stub sends `ImportedFiles`.
    """

    endpoint: str
    token: str
    process_title: str
    lifeline_fd: int
    rings_fd: int
    work_event_fd: int
    host_event_fd: int
    bls_event_fd: int
    arena: int
    arena_fd: int
    arena_limit: int
    host_arena_fd: int
    host_arena_limit: int
    report_imports: bool = False

    DESCRIPTORS: ClassVar[Tuple[str, ...]] = (
        "lifeline_fd",
        "rings_fd",
        "work_event_fd",
        "host_event_fd",
        "bls_event_fd",
        "arena_fd",
        "host_arena_fd",
    )


_MAX_MESSAGE = 1 << 16  # bytes
_MAX_ERROR = 5000  # characters; each takes at most 12 bytes


class RequestRefused(Exception):
    """Raised for a request that cannot be fulfilled; the other end is told why."""


def send_request(sock: socket.socket, spawn: SpawnArguments, stdout: int, stderr: int) -> None:
    """Requests a stub; the fork server receives copies of all descriptors. Raises OSError."""
    descriptors = [*spawn.descriptors, stdout, stderr]
    socket.send_fds(sock, [spawn.dump().encode()], descriptors)


def receive_request(sock: socket.socket) -> Optional[Tuple[SpawnArguments, int, int]]:
    """Receives a request: arguments with the received descriptors, and those of stdout and stderr.

    Returns None at the end of the connection. Raises RequestRefused if this process cannot open
    that many descriptors.
    """
    count = len(SpawnArguments.DESCRIPTORS) + 2
    data, descriptors, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, count)
    if not data:
        return None
    spawn = SpawnArguments.load(data.decode())
    if len(descriptors) < count:
        for descriptor in descriptors:
            os.close(descriptor)
        send_refused(sock, spawn.token, errno.EMFILE)
        raise RequestRefused(os.strerror(errno.EMFILE))
    *own, stdout, stderr = descriptors
    fields: Dict[str, Any] = dict(zip(SpawnArguments.DESCRIPTORS, own))
    return replace(spawn, **fields), stdout, stderr


def send_started(sock: socket.socket, token: str, pid: int, pidfd: int) -> None:
    """Reports that the stub with this token has started. Raises OSError."""
    socket.send_fds(sock, [_dump({"token": token, "pid": pid})], [pidfd])


def send_prepared(sock: socket.socket, error: str) -> None:
    """Reports that the model is prepared, or why it is not. Raises OSError."""
    sock.send(_dump({"prepared": error[:_MAX_ERROR]}))


def send_refused(sock: socket.socket, token: str, error: int) -> None:
    """Reports that the stub with this token cannot start; `error` is an errno. Raises OSError."""
    sock.send(_dump({"token": token, "error": error}))


def send_ended(sock: socket.socket, pid: int, code: int) -> None:
    """Reports that a stub has ended; `code` is a return code as in `subprocess`. Raises OSError."""
    sock.send(_dump({"pid": pid, "code": code}))


def receive_event(sock: socket.socket) -> Optional[Tuple[Dict[str, object], Sequence[int]]]:
    """Receives a report: `token` and `pid` with a pidfd, `token` and `error`, `pid` and `code`, or
    `prepared`.

    Returns None at the end of the connection. Raises BlockingIOError if there is no report yet.
    """
    data, descriptors, _, _ = socket.recv_fds(sock, _MAX_MESSAGE, 1)
    if not data:
        return None
    event: Dict[str, object] = json.loads(data)
    return event, descriptors


def _dump(event: Dict[str, object]) -> bytes:
    return json.dumps(event).encode()
