"""The inference requests of one frontend process, in the core."""

from __future__ import annotations

import asyncio
import logging
import threading
from collections import deque
from collections.abc import Callable
from functools import partial

from host.access.api_keys import ApiKeys
from host.access.clients import Admission, Client
from host.core import Core
from host.errors import HostError, internal, unexpected_failure
from host.frontend_processes.exchanged_memory import CoreMemory
from host.frontend_processes.frontend_messages import (
    FinishTrace,
    Infer,
    RepeatedInfer,
    RequestAccepted,
    RequestTaken,
    Response,
    ToFrontend,
    WireResponse,
    WireTensor,
    WireTrace,
    encode_error,
)
from host.frontend_processes.request_templates import ReceivedTemplates
from host.frontends.classification import classify
from host.inference.call import Call
from host.inference.request import Classification, InferRequest, InferResponse, RequestTrace, Tensor
from host.instances.arenas import arena_full_error
from host.models.registry import NotServedError
from stub.wire.arena import ArenaFull

_log = logging.getLogger("pbhost")


class ServedRequest:
    """One request: its call once it is started, and the responses that the client has not taken."""

    __slots__ = ("call", "classification", "confirm", "starting", "unacknowledged")

    def __init__(self, classification: Classification | None, confirm: bool) -> None:
        self.confirm = confirm
        self.classification = classification
        self.call: Call | None = None
        self.starting: asyncio.Task[None] | None = None  # waits for its model to load
        self.unacknowledged: deque[InferResponse] = deque()


class _Reservation:
    """The memory of a request in its frontend process, until the request is taken or ended."""

    __slots__ = ("_loop", "_number", "_send", "_thread")

    def __init__(self, number: int, send: Callable[[ToFrontend], None]) -> None:
        self._number = number
        self._send = send
        self._loop = asyncio.get_running_loop()
        self._thread = threading.get_ident()

    def __del__(self) -> None:
        message = RequestTaken(self._number)
        if threading.get_ident() == self._thread:
            self._send(message)
        elif not self._loop.is_closed():  # the garbage collector runs in any thread
            self._loop.call_soon_threadsafe(self._send, message)


class ServedRequests:
    """Starts the requests of one frontend process, and sends their responses.

    `send` raises ValueError, TypeError or OverflowError for a message that cannot be encoded.
    """

    def __init__(
        self,
        core: Core,
        memory: CoreMemory,
        send: Callable[[ToFrontend], None],
        api_keys: ApiKeys | None,
        admissions: dict[int, Admission],
    ) -> None:
        """`api_keys`: the keys that clients need. `admissions`: requests that have waited."""
        self._core = core
        self._api_keys = api_keys
        self._admissions = admissions
        self._memory = memory
        self._send = send
        self._requests: dict[int, ServedRequest] = {}
        self._templates = ReceivedTemplates()
        self._traces: dict[int, RequestTrace] = {}

    def start(self, message: Infer) -> None:
        """Starts a request. Raises KeyError or ValueError if the process breaks the protocol."""
        number = message.number
        if number in self._requests:
            raise ValueError(f"request {number} is open already")
        request = InferRequest(
            message.model,
            [],
            message.version,
            message.id,
            message.outputs,
            message.parameters,
            message.correlation_id,
            message.flags,
            message.priority,
            message.timeout_us,
            classification=None if message.classes is None else Classification(message.classes),
        )
        if message.reserved:
            request.reserved_memory = _Reservation(number, self._send)
        inputs = [
            self._memory.decode_tensor(wire) if wire.region is None else wire
            for wire in message.inputs
        ]
        if message.template:
            self._templates.add(message, request)
        if message.trace is not None and self._core.request_tracer is not None:
            request.trace = self._start_trace(message.trace)
        served = ServedRequest(request.classification, message.confirm)
        self._start(message, served, request, partial(self._start_call, message, request, inputs))

    def repeat(self, message: RepeatedInfer) -> None:
        """Starts a request like an earlier one. Raises as `start`."""
        number = message.number
        if number in self._requests:
            raise ValueError(f"request {number} is open already")
        template = self._templates.get(message.template)
        request = template.build_request(message, self._memory)
        if message.reserved:
            request.reserved_memory = _Reservation(number, self._send)
        served = ServedRequest(None, False)
        self._start(message, served, request, partial(self._core.infer, request, template.unary))

    def _start(
        self,
        message: Infer | RepeatedInfer,
        served: ServedRequest,
        request: InferRequest,
        start: Callable[[], Call],
    ) -> None:
        """Starts a request by `start`, maybe once its model is loaded; else responds with why."""
        number = message.number
        self._requests[number] = served
        client: Client | None = None
        try:
            if self._api_keys is None:
                call = start()
            else:
                client = self._api_keys.authorize("inference", message.authorization)
                client.check_model(request.model_name)
                call = self._admissions.pop(message.admission, client).start_request(start)
        except NotServedError as error:
            if self._core.loads_on_demand:
                served.starting = asyncio.ensure_future(
                    self._start_when_loaded(number, served, request, start, client)
                )
            else:
                self._refuse(number, error)
        except HostError as error:
            self._refuse(number, error)
        except Exception as error:  # a defect of ours: its client gets a response all the same
            _log.exception("a request of a frontend process cannot be started")
            self._refuse(number, unexpected_failure(error))
        else:
            self._subscribe(number, served, call)

    def _start_call(
        self, message: Infer, request: InferRequest, inputs: list[Tensor | WireTensor]
    ) -> Call:
        if any(wire.region is not None for wire in message.inputs) or message.placement:
            # An unknown model is reported before an unknown region.
            version = "" if message.version == -1 else str(message.version)
            self._core.model_config(message.model, version)
        regions = self._core.regions
        request.inputs = []
        for entry in inputs:
            if isinstance(entry, WireTensor):
                assert entry.region is not None
                block = regions.find_block(entry.region, entry.offset, entry.size)
                entry = Tensor(entry.name, entry.datatype, entry.shape, block, block)
            request.inputs.append(entry)
        if message.placement:
            request.output_placement = {
                output: regions.find_block(*part) for output, part in message.placement.items()
            }
        return self._core.infer(request, message.unary)

    async def _start_when_loaded(
        self,
        number: int,
        served: ServedRequest,
        request: InferRequest,
        start: Callable[[], Call],
        client: Client | None,
    ) -> None:
        """Starts a request whose model is not loaded; the wait counts."""
        try:
            if client is None:
                call = await self._core.start_when_loaded(request, start)
            else:
                call = await client.start_after_wait(
                    lambda: self._core.start_when_loaded(request, start)
                )
        except HostError as error:
            self._refuse(number, error)
        except Exception as error:  # a defect of ours, as in `start`
            _log.exception("a request of a frontend process cannot be started")
            self._refuse(number, unexpected_failure(error))
        else:
            served.starting = None
            self._subscribe(number, served, call)

    def _subscribe(self, number: int, served: ServedRequest, call: Call) -> None:
        served.call = call
        if served.confirm:
            self._send(RequestAccepted(number))
        call.subscribe(partial(self._respond, number, served))

    def _refuse(self, number: int, error: HostError) -> None:
        """Responds to a request that was not started."""
        if self._requests.pop(number, None) is not None:
            body = WireResponse("", -1, "", [], {}, encode_error(error))
            self._send(Response(number, body, refused=True))

    def _respond(
        self, number: int, served: ServedRequest, response: InferResponse | None, final: bool
    ) -> None:
        if final:
            if self._requests.pop(number, None) is None:
                return
        elif response is not None:
            served.unacknowledged.append(response)
        body = None
        if response is not None:
            body = self._encode_response(response, served.classification)
        try:
            self._send(Response(number, body, final))
        except (TypeError, ValueError, OverflowError) as error:  # a name or a value of the model
            assert response is not None and body is not None
            self._memory.cancel_export(body.outputs)
            response.error = internal(
                f"response of model '{response.model_name}' cannot be sent: {error}"
            )
            self._send(Response(number, self._encode_response(response, None), final))

    def _encode_response(
        self, response: InferResponse, classification: Classification | None
    ) -> WireResponse:
        error = response.error
        outputs: list[WireTensor] = []
        if error is None:
            try:
                if classification is not None:
                    response = classify(response, classification)
                encode, count = self._memory.encode_tensor, len(response.outputs)
                for output in response.outputs:
                    outputs.append(encode(output, count))  # noqa: PERF401 - the list is complete up to an error
            except ArenaFull as full:
                error = arena_full_error(full)
            except HostError as failure:
                error = failure
            except Exception as failure:  # such as OSError for an arena; the client gets a response
                _log.exception("a response cannot be passed to a frontend process")
                error = unexpected_failure(failure)
        if error is not None:
            self._memory.cancel_export(outputs)
            outputs = []
        return WireResponse(
            response.model_name,
            response.model_version,
            response.id,
            outputs,
            response.parameters if error is None else {},
            None if error is None else encode_error(error),
        )

    def cancel(self, number: int) -> None:
        """Cancels a request, unless it has ended."""
        served = self._requests.pop(number, None)
        if served is None:
            return
        if served.starting is not None:
            served.starting.cancel()
        if served.call is not None:
            served.call.cancel()

    def acknowledge(self, number: int) -> None:
        """Tells the model that the client has taken a response. Raises KeyError or IndexError."""
        served = self._requests.get(number)
        if served is not None and served.call is not None:
            served.call.acknowledge_response(served.unacknowledged.popleft())

    # Traces

    def _start_trace(self, wire: WireTrace) -> RequestTrace | None:
        tracer = self._core.request_tracer
        trace = None if tracer is None else tracer.start_trace(wire.model, wire.headers.get)
        if trace is not None:
            self._traces[wire.number] = trace
            for name, ns in wire.events:
                trace.record_event(name, ns)
        return trace

    def finish_trace(self, message: FinishTrace) -> None:
        """Adds the last events of a trace, and ends it."""
        wire = message.trace
        if not message.started:  # no request was sent for it
            self._start_trace(wire)
        trace = self._traces.pop(wire.number, None)
        if trace is not None:
            if message.started:
                for name, ns in wire.events:
                    trace.record_event(name, ns)
            trace.finish_response()

    def close(self) -> None:
        """Cancels all requests: the process has ended."""
        for number in list(self._requests):
            self.cancel(number)
        for trace in self._traces.values():
            trace.finish_response()
        self._traces.clear()
