"""The gRPC service without gRPC: every RPC as a handler of bytes, for any engine to carry."""

from __future__ import annotations

import asyncio
import dataclasses

from host.core import Core
from host.errors import HostError, unavailable
from host.frontends.classification import classify
from host.frontends.forwarding import NOTHING_FORWARDED, Forwarding
from host.frontends.grpc.admin import admin_methods
from host.frontends.grpc.codec import InferMessage, parse_infer_request, to_request
from host.frontends.grpc.encode import encode_infer_response
from host.frontends.grpc.methods import (
    NO_METADATA,
    Client,
    Context,
    Done,
    Method,
    Services,
    Serving,
    StreamMethod,
    UnaryMethod,
)
from host.frontends.grpc.request_cache import Recurring
from host.frontends.grpc.stream import InferStream
from host.frontends.open_requests import OpenRequests
from host.frontends.restrictions import UNRESTRICTED, Restrictions
from host.inference.request import Call, Classes, InferRequest, InferResponse, RequestTrace, Tracing
from host.models.registry import parse_version

INFERENCE = "inference.GRPCInferenceService"
HEALTH = "grpc.health.v1.Health"

STOPPING = "GRPC server is shutting down and has stopped accepting new requests."

# HealthCheckResponse has one field, the enum `status` = 1.
_SERVING, _NOT_SERVING = b"\x08\x01", b"\x08\x02"


class GrpcService:
    """All RPCs over one core. Everything here belongs to the event loop's thread.

    Once `drain` is called, new inference requests are refused with UNAVAILABLE.
    """

    def __init__(
        self,
        core: Core,
        restrictions: Restrictions = UNRESTRICTED,
        forwarding: Forwarding = NOTHING_FORWARDED,
    ) -> None:
        self._core = core
        self._restrictions = restrictions
        self._forwarding = forwarding
        self._forwards = bool(forwarding)
        self._recurring = Recurring()
        self._restricted = "inference" in restrictions
        self._open = OpenRequests()
        self._streams: set[InferStream] = set()

    def services(self) -> Services:
        """The table that an engine carries."""
        guarded: Services = {
            INFERENCE: [
                StreamMethod("ModelStreamInfer", self._start_stream, "inference"),
                *admin_methods(self._core),
            ],
            HEALTH: [UnaryMethod("Check", self._health_check, "health")],
        }
        services = {
            name: [_guard(method, self._restrictions) for method in methods]
            for name, methods in guarded.items()
        }
        # This one has its guard in start_infer, so that an engine may call that itself.
        infer = UnaryMethod("ModelInfer", self._model_infer, "inference", self.start_infer)
        services[INFERENCE].insert(0, infer)
        return services

    def start_infer(self, data: bytes, done: Done, context: Context = NO_METADATA) -> Call:
        """ModelInfer without a coroutine: `done` is called once, maybe before this returns.

        Cancelling the returned call is the engine's part. Raises HostError if there is no call.
        """
        if self._restricted:
            _check(self._restrictions, "inference", context)
        known = self._recurring.request(data)
        if known is not None:
            request = known[0]
        else:
            message = parse_infer_request(data)
            request = self._interpret(message)
            self._recurring.learn(data, message, request)
        if self._forwards or self._open.exiting or self._core.tracing is not None:
            call = self._submit(request, context, unary=True)
        else:
            call = self._core.infer(request, True)
        self._open.count += 1

        def finish(response: InferResponse | HostError) -> None:
            self._open.leave()
            answer = _answer(response, request.classes)
            if request.trace is None:
                done(answer)
            else:
                _send_traced(request.trace, done, answer)

        call.subscribe_single(finish)
        return call

    @property
    def open_requests(self) -> int:
        """How many inference RPCs are not answered yet."""
        return self._open.count

    async def drain(self, timeout: float) -> bool:
        """Refuse new inference requests and wait for open ones, at most `timeout` seconds.

        Streams end with UNAVAILABLE as soon as their requests are answered. False if the time was
        too short.
        """
        if not self._open.exiting:
            for stream in list(self._streams):
                stream.end(unavailable(STOPPING))
        return await self._open.drain(timeout)

    def admit(self, data: bytes, context: Context) -> tuple[InferMessage, str, Call | HostError]:
        """Hand a request of a stream to the core: what it says, its id, and what came of it."""
        message, request_id = InferMessage(), ""
        try:
            known = self._recurring.request(data)
            if known is not None:
                request, message = known
                request_id = request.id
            else:
                message = parse_infer_request(data)
                request_id = message.id
                request = self._interpret(message)
                self._recurring.learn(data, message, request)
            return message, request_id, self._submit(request, context, unary=False)
        except HostError as early:
            return message, request_id, early

    def decoupled(self, message: InferMessage) -> bool:
        """Whether the model of the message is decoupled; False if it is unknown."""
        try:
            config = self._core.model_config(message.model_name, message.model_version)
        except HostError:
            return False
        return bool(config.model_transaction_policy.decoupled)

    def _interpret(self, message: InferMessage) -> InferRequest:
        if self._open.exiting:
            raise unavailable(STOPPING)
        try:
            return to_request(message, self._core.regions)
        except HostError:
            # The version is checked before the model is looked up, all else after that (spec 2.2).
            parse_version(message.model_version)
            self._core.model_metadata(message.model_name, message.model_version)
            raise

    def _submit(self, request: InferRequest, context: Context, unary: bool) -> Call:
        if self._open.exiting:
            raise unavailable(STOPPING)
        if self._forwards:
            request.parameters.update(self._forwarding.parameters(context.all_metadata()))
        if self._core.tracing is not None:
            return self._infer_traced(self._core.tracing, request, context, unary)
        return self._core.infer(request, unary)

    def _infer_traced(
        self, tracing: Tracing, request: InferRequest, context: Context, unary: bool
    ) -> Call:
        trace = request.trace = tracing.start(request.model_name, context.metadata)
        if trace is None:
            return self._core.infer(request, unary)
        # A message is known of when all of it is there.
        trace.stamp("GRPC_WAITREAD_START")
        trace.stamp("GRPC_WAITREAD_END")
        try:
            return self._core.infer(request, unary)
        except HostError:
            trace.close()
            raise

    async def _model_infer(self, data: bytes, context: Context) -> bytes:
        answer: asyncio.Future[bytes | HostError] = asyncio.get_running_loop().create_future()

        def done(result: bytes | HostError) -> None:
            if not answer.done():
                answer.set_result(result)

        call = self.start_infer(data, done, context)
        try:
            result = await answer
        except asyncio.CancelledError:  # the client has gone, or its deadline has passed
            call.cancel()
            raise
        if isinstance(result, HostError):
            raise result
        return result

    def _start_stream(self, client: Client, context: Context) -> InferStream:
        if self._open.exiting:
            raise unavailable(STOPPING)
        errors_end_it = context.metadata("triton_grpc_error") == "true"
        stream = InferStream(self, client, context, errors_end_it)
        self._streams.add(stream)
        self._open.count += 1
        return stream

    def left(self, stream: InferStream) -> None:
        """A stream is over."""
        self._streams.discard(stream)
        self._open.leave()

    async def _health_check(self, data: bytes, context: Context) -> bytes:
        return _SERVING if await self._core.ready() else _NOT_SERVING


def _check(restrictions: Restrictions, category: str, context: Context) -> None:
    """Raises HostError unless the client sent the metadata that this category asks for, if any."""
    lacking = restrictions.lacking(category, context.metadata)
    if lacking is not None:
        raise unavailable(f"This protocol is restricted, expecting header '{lacking}'")


def _guard(method: Method, restrictions: Restrictions) -> Method:
    """The method behind that check, which comes before anything is read from a stream."""
    if method.category not in restrictions:
        return method
    if isinstance(method, StreamMethod):
        stream = method.start

        def start(client: Client, context: Context) -> Serving:
            _check(restrictions, method.category, context)
            return stream(client, context)

        return dataclasses.replace(method, start=start)
    unary = method.handler

    async def answer(data: bytes, context: Context) -> bytes:
        _check(restrictions, method.category, context)
        return await unary(data, context)

    return dataclasses.replace(method, handler=answer)


def _send_traced(trace: RequestTrace, done: Done, answer: bytes | HostError) -> None:
    trace.stamp("GRPC_SEND_START")
    done(answer)
    trace.stamp("GRPC_SEND_END")
    trace.close()


def _answer(response: InferResponse | HostError, classes: Classes | None) -> bytes | HostError:
    if isinstance(response, HostError):
        return response
    try:
        return encode_infer_response(classify(response, classes) if classes else response)
    except HostError as error:
        return error
