"""Relays BLS requests of a model's forked children through the stub process.

A child writes its request into an unnamed file, and passes the file and one end of a socket pair to
the stub. The service thread of the stub sends the request to the host, and passes back a file with
the response. All children share one socket, which keeps messages apart.
"""

import os
import socket
import sys
from array import array
from typing import Callable, List, Optional

import pb_utils
from pb_utils._request_fields import RequestFields
from pb_utils._runtime import ResponseReceiver, Runtime
from stub.conversion import (
    ConversionError,
    inline_wire_response,
    place_inputs_in_arena,
    request_to_wire_inline,
    response_from_wire,
)
from stub.memory import StubMemory
from stub.runtime import StubRuntime
from stub.wire.arena import ArenaFull
from stub.wire.messages import (
    BlsRequest,
    BlsResponse,
    WireError,
    WireResponse,
    decode_to_host,
    decode_to_stub,
    encode,
)
from stub.wire.shared_file import create_shared_file

_BYTE = b"\0"  # the only content of a message; the rest is in its file descriptors
_INTERNAL = 1


class ForkedChildren:
    """The stub's end of the relay; it sets up every child forked after its construction."""

    def __init__(self, runtime: StubRuntime, memory: StubMemory) -> None:
        self._runtime = runtime
        self._memory = memory
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        ours.setblocking(False)
        self._ours, self._theirs = ours, theirs
        os.register_at_fork(after_in_child=self._set_up_child)

    @property
    def descriptor(self) -> int:
        """The descriptor to poll; when it is readable, call `serve_request`."""
        return self._ours.fileno()

    def _set_up_child(self) -> None:
        self._ours.close()
        pb_utils._runtime.install(ForkedChildRuntime(self._theirs, self._memory, self._runtime))

    def serve_request(self) -> None:
        """Receives one request, if there is any, and sends it to the host."""
        try:
            descriptors = _receive_descriptors(self._ours, 2)
        except BlockingIOError:
            return
        if len(descriptors) != 2:  # none at the end; fewer if this process may open no more
            for descriptor in descriptors:
                os.close(descriptor)
            return
        request_file, reply = descriptors
        try:
            (message,) = decode_to_host(_read_file(request_file))
        finally:
            os.close(request_file)
        assert isinstance(message, BlsRequest)

        def answer(response: Optional[WireResponse], final: bool) -> None:
            assert response is not None
            frame = encode([BlsResponse(0, inline_wire_response(response, self._memory))])
            with socket.socket(fileno=reply) as connection:
                try:
                    _send_frame(connection, frame)
                except OSError:
                    pass  # the child has ended, or this process may open no more descriptors

        try:
            request = place_inputs_in_arena(message.request, self._memory)
        except ArenaFull as full:
            answer(WireResponse([], {}, WireError(_INTERNAL, str(full))), True)
            return
        self._runtime.send_wire_request(request, False, answer)


class ForkedChildRuntime(Runtime):
    """The runtime of `pb_utils` in a forked child: it relays BLS requests, and prints log lines."""

    def __init__(self, relay: socket.socket, memory: StubMemory, parent: StubRuntime) -> None:
        self._relay = relay
        self._memory = memory
        self._parent = parent

    def log(self, level: int, filename: str, line: int, message: str) -> None:
        """Prints a log line; the host logs the output of its stubs."""
        sys.stderr.write(f"{filename}:{line}] {message}\n")

    def model_dir(self) -> str:
        """Returns `<model directory>/<version>`."""
        return self._parent.model_dir()

    def exec(self, request: RequestFields) -> pb_utils.InferenceResponse:
        """Sends a request to another model through the stub, and waits for the response."""
        self._parent.check_bls_allowed()
        try:
            frame = encode([BlsRequest(0, request_to_wire_inline(request), 0, False)])
        except ConversionError as problem:
            return pb_utils.InferenceResponse._from_wire(
                [], pb_utils.TritonError(str(problem)), None
            )
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            with theirs:
                _send_frame(self._relay, frame, theirs.fileno())
            descriptors = _receive_descriptors(ours, 1)
        if not descriptors:
            raise pb_utils.TritonModelException(
                "the stub process of this child has ended, or has no descriptors left"
            )
        try:
            (answer,) = decode_to_stub(_read_file(descriptors[0]))
        finally:
            os.close(descriptors[0])
        assert isinstance(answer, BlsResponse) and answer.response is not None
        return response_from_wire(answer.response, self._memory)

    def send_request(
        self, request: RequestFields, decoupled: bool, receive: ResponseReceiver
    ) -> Callable[[], None]:
        """Sends a request that is not decoupled, and waits for the response.

        Raises TritonModelException for a decoupled request.
        """
        if decoupled:
            raise self._unsupported("A decoupled request to another model (BLS)")
        receive(self.exec(request), True)
        return lambda: None

    def error_message(self, text: str) -> str:
        """Returns the text of an error of the host, as the stub does."""
        return self._parent.error_message(text)

    def _unsupported(self, what: str) -> pb_utils.TritonModelException:
        return pb_utils.TritonModelException(
            f"{what} is not supported in a forked child of a model;"
            " use it in the model's own process"
        )


def _send_frame(connection: socket.socket, frame: bytes, *descriptors: int) -> None:
    """Sends a frame, in an unnamed file, and further descriptors."""
    file = create_shared_file("pbhost-bls-request", len(frame))
    try:
        rest = memoryview(frame)
        while rest:
            rest = rest[os.write(file, rest) :]
        rights = array("i", [file, *descriptors])
        connection.sendmsg([_BYTE], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
    finally:
        os.close(file)


def _receive_descriptors(connection: socket.socket, count: int) -> List[int]:
    """Receives the descriptors of one message; returns none at the end of the connection."""
    descriptors = array("i")
    _, ancillary, _, _ = connection.recvmsg(1, socket.CMSG_SPACE(count * descriptors.itemsize))
    for level, kind, data in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(data[: len(data) - len(data) % descriptors.itemsize])
    return list(descriptors)


def _read_file(file: int) -> bytes:
    size = os.fstat(file).st_size
    parts: List[bytes] = []
    offset = 0
    while offset < size:
        part = os.pread(file, size - offset, offset)
        parts.append(part)
        offset += len(part)
    return b"".join(parts)
