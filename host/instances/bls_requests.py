"""The BLS requests of one stub's model: from its messages to the responses that it gets."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass

from host.errors import ErrorCode, HostError, internal
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse
from host.instances.services import HostServices
from host.instances.transfer import BLS, WORK, TensorTransfer
from stub.wire import messages as m
from stub.wire.messages import WireResponse
from stub.wire.session import Session, State

_log = logging.getLogger("pbhost")

_OPEN_STATES = (State.SERVING, State.FINALIZING)  # in which the stub reads responses
_MAX_FRAME_BYTES = 1 << 14  # of tensors in responses, then their frame is sent at once

_PARENT_CANCELLED = "the request was cancelled because its parent request was cancelled"
_CANCELLED_BY_MODEL = "the request was cancelled by the model that sent it"


@dataclass(slots=True)
class BlsRequest:
    """A BLS request, and the batch that made it, 0 if unknown."""

    number: int
    request: InferRequest
    batch_number: int
    blocking: bool
    decoupled: bool


class BlsRequests:
    """The requests in progress. The responses of one turn of the loop are sent in one frame.

    `send_work` sends a frame to the main thread of the stub, `send_bls_responses` one to the thread
    that reads responses.
    """

    def __init__(
        self,
        services: HostServices,
        transfer: TensorTransfer,
        protocol: Session,
        send_work: Callable[[Sequence[m.ToStub]], None],
        send_bls_responses: Callable[[Sequence[m.ToStub]], None],
    ) -> None:
        self.blocking_calls: dict[int, Call] = {}
        """Requests that their batch waits for."""
        self._open: dict[int, tuple[BlsRequest, Call]] = {}
        self.pending: dict[int, tuple[BlsRequest, asyncio.Task[None]]] = {}
        """Requests whose model is not ready yet."""
        self._services = services
        self._transfer = transfer
        self._protocol = protocol
        self._send_work = send_work
        self._send_bls_responses = send_bls_responses
        # Responses that have not been sent yet, and the bytes of their tensors.
        self._frame: list[m.ToStub] = []
        self._frame_bytes = 0

    def start_request(self, bls_request: BlsRequest) -> None:
        """Starts a request; a failure to start it is a response."""
        try:
            call = self._services.models.infer_for_bls(bls_request.request, bls_request.decoupled)
            if isinstance(call, Call):
                self._add_call(bls_request, call)
                return
        except HostError as error:
            self._send_error(bls_request, error)
            return
        except Exception:  # a defect: logged, and answered with an error
            self._send_internal_error(bls_request)
            return
        task = asyncio.get_running_loop().create_task(self._add_when_ready(bls_request, call))
        self.pending[bls_request.number] = bls_request, task

    async def _add_when_ready(
        self, bls_request: BlsRequest, starting: Coroutine[None, None, Call]
    ) -> None:
        """Starts a request once the target model has said that it is ready."""
        try:
            self._add_call(bls_request, await starting)
            self.break_deadlock(bls_request)
        except HostError as error:
            self._send_error(bls_request, error)
        except Exception:  # a defect: logged, and answered with an error
            self._send_internal_error(bls_request)
        finally:
            self.pending.pop(bls_request.number, None)

    def _add_call(self, bls_request: BlsRequest, call: Call) -> None:
        number = bls_request.number

        def on_response(response: InferResponse | None, final: bool) -> None:
            if final:
                self._open.pop(number, None)
                self.blocking_calls.pop(number, None)
            if response is None and not bls_request.decoupled:
                empty = internal("Unexpected empty response.")
                response = InferResponse(bls_request.request.model_name, -1, error=empty)
            self._send_response(number, response, final, bls_request.blocking)
            if response is not None:
                call.acknowledge_response(response)

        self._open[number] = bls_request, call
        call.subscribe(on_response)
        if bls_request.batch_number and bls_request.blocking and not call.finished:
            self.blocking_calls[number] = call

    def break_deadlock(self, bls_request: BlsRequest) -> None:
        """Fails the call of a request if it waits for itself, now or when a cycle forms.

        To be called when nothing that has arrived is left to act on, as it may wait for that.
        """
        _, call = self._open.get(bls_request.number, (None, None))
        if call is not None and bls_request.batch_number and not call.finished:
            self._services.models.break_deadlock(call)

    def end_batch(self, batch: int) -> None:
        """Called when a batch has ended: it waits for nothing, even if its wait was broken off."""
        for number in list(self.blocking_calls):
            if self._open[number][0].batch_number == batch:
                del self.blocking_calls[number]
        for bls_request, _ in self.pending.values():
            if bls_request.batch_number == batch and bls_request.blocking:
                bls_request.batch_number = 0

    def calls_of_batch(self, batch: int) -> list[Call]:
        """The calls in progress that a batch has made."""
        return [
            call for bls_request, call in self._open.values() if bls_request.batch_number == batch
        ]

    @property
    def awaited_models(self) -> set[str]:
        """The models that have to be loaded, or asked whether they are ready, before a request."""
        return {bls_request.request.model_name for bls_request, _ in self.pending.values()}

    def find_awaited_models(self) -> set[str]:
        """As `awaited_models`, with those that the models wait for that have been asked."""
        found = self.awaited_models
        seen: set[Call] = set()
        todo = [call for _, call in self._open.values()]
        while todo:
            call = todo.pop()
            if call not in seen and call.holder is not None:
                seen.add(call)
                found |= set(call.holder.awaited_models)
                todo += call.holder.blocking_calls
        return found

    def _send_error(self, bls_request: BlsRequest, error: HostError) -> None:
        response = InferResponse(bls_request.request.model_name, -1, error=error)
        self._send_response(bls_request.number, response, True, bls_request.blocking)

    def _send_internal_error(self, bls_request: BlsRequest) -> None:
        """Answers a request that failed by a defect, so that the model does not wait forever."""
        _log.exception("unexpected failure of a request to '%s'", bls_request.request.model_name)
        self._send_error(bls_request, internal("unexpected failure; the server's log tells more"))

    def cancel_request(self, number: int) -> None:
        """Cancels a request; responses that still come are passed on."""
        if number in self._open:
            _, call = self._open[number]
            call.request_cancellation(HostError(ErrorCode.CANCELLED, _CANCELLED_BY_MODEL))
        elif number in self.pending:
            bls_request, task = self.pending.pop(number)
            task.cancel()
            self._send_error(bls_request, HostError(ErrorCode.CANCELLED, _CANCELLED_BY_MODEL))

    def cancel_batch(self, batch: int) -> None:
        """Cancels the requests of a batch whose callers have all gone."""
        for bls_request, call in list(self._open.values()):
            if bls_request.batch_number == batch:
                call.abort(HostError(ErrorCode.CANCELLED, _PARENT_CANCELLED))
        for bls_request, task in list(self.pending.values()):
            if bls_request.batch_number == batch:
                del self.pending[bls_request.number]
                task.cancel()
                self._send_error(bls_request, HostError(ErrorCode.CANCELLED, _PARENT_CANCELLED))

    def cancel_all(self) -> None:
        """Cancels all requests without further responses."""
        pending, self.pending = self.pending, {}
        for _, task in pending.values():
            task.cancel()
        open_calls, self._open = self._open, {}
        self.blocking_calls.clear()
        for _, call in open_calls.values():
            call.cancel()

    # Messages

    def decode_request(self, message: m.BlsRequest) -> BlsRequest:
        """The request of a message. Raises ValueError or KeyError if it is invalid."""
        request = self._transfer.decode_request(message.request)
        request.trace = self._services.models.create_child_trace(message.request.trace)
        return BlsRequest(
            message.number, request, message.batch, message.blocking, message.decoupled
        )

    def _send_response(
        self, number: int, response: InferResponse | None, final: bool, blocking: bool
    ) -> None:
        """Sends a response, None for an end without one.

        `final`: whether it is the last one. `blocking`: whether the batch waits for it.
        """
        if self._protocol.state not in _OPEN_STATES:
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
            self._send_work(frame)
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
        if not frame or self._protocol.state not in _OPEN_STATES:
            return
        block_releases = self._transfer.collect_releases()
        if block_releases is not None:
            frame.append(block_releases)
        self._send_bls_responses(frame)
