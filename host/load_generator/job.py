"""What a worker process is told to do, and what it has measured."""

from __future__ import annotations

import enum
import struct
from array import array

import msgspec


class Protocol(str, enum.Enum):
    """How requests are sent, and how their responses are read."""

    GRPC = "grpc"
    """ModelInfer over HTTP/2: a stream for each request."""

    GRPC_STREAM = "stream"
    """ModelStreamInfer: a stream takes one request after the other, with several responses each."""

    HTTP = "http"
    """HTTP/1.1: a connection takes one request after the other."""

    HTTP_EVENTS = "events"
    """HTTP/1.1 with server-sent events as responses, as `/v1` has them."""


class Target(msgspec.Struct, frozen=True):
    """A server. `headers`: the fields of each request over HTTP/2; with HTTP/1.1, requests have
    them already. `certificates`: PEM files with the authorities to trust instead of those of the
    machine, and with the client's certificate and key; "" for none.
    """

    host: str
    port: int
    tls: bool
    protocol: Protocol
    headers: list[tuple[bytes, bytes]] = []
    certificates: tuple[str, str, str] = ("", "", "")

    @property
    def address(self) -> str:
        """The address, for errors."""
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"


class Job(msgspec.Struct, frozen=True, tag=True):
    """A load of one worker process.

    `chains`: requests, as they are sent; each sender repeats its own chain if there are several,
    which is what sequences need, and otherwise all of them share one. `ends`: for each sequence the
    request that ends it early. `concurrency`: requests in
    flight in closed loop; 0 for an open loop with `rate` requests per second, which begins after
    `offset` seconds, so that processes do not send at the same times. `requests`: the
    number of requests after which the load ends; 0: it ends when it is told to. `timeout`: seconds
    until the last response to a request.
    """

    target: Target
    chains: list[list[bytes]]
    ends: list[bytes] = []
    concurrency: int = 0
    rate: float = 0.0
    offset: float = 0.0
    poisson: bool = False
    seed: int = 0
    requests: int = 0
    timeout: float = 60.0


class Cut(msgspec.Struct, frozen=True, tag=True):
    """Asks for a slice: what was measured since the last one."""


class Stop(msgspec.Struct, frozen=True, tag=True):
    """Ends the load. Responses in flight and open sequences get a short time to finish."""


class Slice(msgspec.Struct, frozen=True, tag=True):
    """What a worker has measured in a part of the time; times are 64-bit floats, in seconds.

    `latencies`: of each successful request, until its last response, and in open loop since the
    time at which it was due. `first`: until its first response. `gaps`: between two responses to a
    request. `lateness`: how much later than due this process noticed that requests are due; what
    waits for a free connection or stream after that is `backlog`. `failures`: counts of failed
    requests by status, and `messages` the first error of each. `cpu` and `waited`: seconds in which
    the process had a CPU, and waited for one. `backlog`: requests that are due and not sent.
    `began` and `finished`: times of `time.perf_counter` at which the load began, and at which all
    `requests` of the job have ended; 0 before that.
    """

    seconds: float
    latencies: bytes
    first: bytes
    gaps: bytes
    lateness: bytes
    responses: int
    failures: dict[str, int]
    messages: dict[str, str]
    cpu: float
    waited: float
    backlog: int
    began: float
    finished: float


TIMES = ("latencies", "first", "gaps", "lateness")
"""What is measured of requests: the arrays of `Measured`, which a `Slice` has as bytes."""


class Measured:
    """What was measured in a part of the time; the attributes are as in `Slice`."""

    def __init__(self) -> None:
        self.latencies = array("d")
        self.first = array("d")
        self.gaps = array("d")
        self.lateness = array("d")
        self.responses = 0
        self.failures: dict[str, int] = {}
        self.messages: dict[str, str] = {}

    def count_failure(self, status: str, message: str) -> None:
        """Counts a failed request."""
        self.failures[status] = self.failures.get(status, 0) + 1
        self.messages.setdefault(status, message)

    def add(self, other: Measured) -> None:
        """Adds what another one has."""
        for name in TIMES:
            getattr(self, name).extend(getattr(other, name))
        self.responses += other.responses
        for status, count in other.failures.items():
            self.failures[status] = self.failures.get(status, 0) + count
        self.messages = {**other.messages, **self.messages}


class Failed(msgspec.Struct, frozen=True, tag=True):
    """The load has ended, as no server answers."""

    error: str


class Stopped(msgspec.Struct, frozen=True, tag=True):
    """The load has ended, as it was told to."""


FRAME_SIZE = struct.Struct("!i")
"""What is before each message: its size, as `multiprocessing.connection` writes it."""

Command = Job | Cut | Stop
Report = Slice | Failed | Stopped

encode = msgspec.msgpack.Encoder().encode
decode_command = msgspec.msgpack.Decoder(Command).decode
decode_report = msgspec.msgpack.Decoder(Report).decode
