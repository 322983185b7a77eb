"""BLS requests and responses of one stub, between messages and the host's form."""

from __future__ import annotations

import asyncio

from host.inference.request import InferResponse
from host.instances.bls_requests import BlsRequest
from host.instances.channel import BLS, WORK
from host.instances.services import Models
from host.instances.stub_connection import StubConnection
from host.instances.transfer import TensorTransfer
from stub.wire import messages as m
from stub.wire.payload import WireResponse
from stub.wire.session import State

_OPEN_STATES = (State.SERVING, State.FINALIZING)  # in which the stub reads responses
_MAX_FRAME_BYTES = 1 << 14  # of tensors in responses, then their frame is sent at once


class BlsTransfer:
    """Decodes requests, and sends the responses of one turn of the loop in one frame."""

    def __init__(
        self, connection: StubConnection, transfer: TensorTransfer, models: Models
    ) -> None:
        self._connection = connection
        self._session = connection.session
        self._transfer = transfer
        self._models = models
        # Responses that have not been sent yet, and the bytes of their tensors.
        self._frame: list[m.ToStub] = []
        self._frame_bytes = 0

    def decode_request(self, message: m.BlsRequest) -> BlsRequest:
        """The request of a message. Raises ValueError or KeyError if it is invalid."""
        request = self._transfer.decode_request(message.request)
        request.trace = self._models.create_child_trace(message.request.trace)
        return BlsRequest(
            message.number, request, message.batch, message.blocking, message.decoupled
        )

    def send_response(
        self, number: int, response: InferResponse | None, final: bool, blocking: bool
    ) -> None:
        """Sends a response, as `BlsRequests` wants it."""
        if self._session.state not in _OPEN_STATES:
            return
        wire: WireResponse | None = None
        if blocking:  # the main thread waits for work, and this response is work
            frame: list[m.ToStub] = []
            if response is not None:
                wire = self._transfer.encode_response(response, WORK, frame)
            block_releases = self._transfer.collect_releases()
            if block_releases is not None:
                frame.append(block_releases)
            frame.append(m.BlsResponse(number, wire, final))
            self._connection.send_work(frame)
            return
        frame = self._frame
        if not frame:
            asyncio.get_running_loop().call_soon(self._send_frame)
        if response is not None:
            wire = self._transfer.encode_response(response, BLS, frame)
            self._frame_bytes += sum(len(output.data or b"") for output in wire.outputs)
        frame.append(m.BlsResponse(number, wire, final))
        if self._frame_bytes >= _MAX_FRAME_BYTES:
            self._send_frame()

    def _send_frame(self) -> None:
        frame, self._frame, self._frame_bytes = self._frame, [], 0
        if not frame or self._session.state not in _OPEN_STATES:
            return
        block_releases = self._transfer.collect_releases()
        if block_releases is not None:
            frame.append(block_releases)
        self._connection.send_bls_responses(frame)
