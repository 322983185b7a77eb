"""The gRPC service: every RPC as a handler of bytes, for any engine."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from functools import partial

from host.errors import HostError, unavailable
from host.frontends.classification import classify
from host.frontends.grpc.cached_responses import MAX_REPEATABLE_BYTES, CachedResponses
from host.frontends.grpc.contents import MIN_LARGE_INPUT_BYTES, LargeInput, decode_inputs
from host.frontends.grpc.infer_request import (
    InferMessage,
    Shapes,
    describe_usual_request,
    parse_infer_request,
    read_placed_request,
    read_usual_request,
    to_request,
)
from host.frontends.grpc.infer_response import encode_infer_response
from host.frontends.grpc.infer_stream import InferStream
from host.frontends.grpc.methods import (
    HEALTH_SERVICE,
    INFERENCE_SERVICE,
    ResponseCallback,
    RpcContext,
    Services,
    StreamHandler,
    StreamMethod,
    StreamWriter,
    UnaryHandler,
    UnaryMethod,
    check_restriction,
    restrict_method,
    to_host_error,
)
from host.frontends.grpc.standard_services import (
    REFLECTION_SERVICES,
    HealthWatch,
    ReflectionStream,
    StandardStream,
)
from host.frontends.inference_core import (
    Cancellable,
    InferenceClient,
    InferenceCore,
    InferenceKeys,
    OpenRequests,
)
from host.frontends.receive_memory import ReservedBytes
from host.frontends.request_headers import (
    NO_FORWARDED_HEADERS,
    UNRESTRICTED,
    HeaderForwarding,
    Restrictions,
)
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, RequestTrace, RequestTracer
from host.models.registry import NotServedError, parse_version

SHUTTING_DOWN = "GRPC server is shutting down and has stopped accepting new requests."


class GrpcService:
    """The inference RPCs over one core, and `others`. Belongs to the event loop's thread.

    After `drain` was called, new inference requests are refused with UNAVAILABLE.
    """

    def __init__(
        self,
        core: InferenceCore,
        others: Services,
        restrictions: Restrictions = UNRESTRICTED,
        forwarding: HeaderForwarding = NO_FORWARDED_HEADERS,
        api_keys: InferenceKeys | None = None,
        reflection: bool = True,
    ) -> None:
        """`reflection`: whether clients may read the services and their messages."""
        self._core = core
        self._others = others
        self._restrictions = restrictions
        self._forwarding = forwarding
        self._forwards_headers = bool(forwarding)
        self._api_keys = api_keys
        self._reads_metadata = bool(forwarding) or api_keys is not None
        self._shapes = Shapes()
        self._cached_responses = CachedResponses(core)
        self._inference_restricted = "inference" in restrictions or api_keys is not None
        self._open_requests = OpenRequests()
        self._streams: set[InferStream] = set()
        self._reflection = reflection
        self._standard_streams: set[StandardStream] = set()

    def services(self) -> Services:
        """The methods that an engine carries."""
        stream = StreamMethod("ModelStreamInfer", self._open_stream, "inference", True)
        unrestricted: Services = {
            **self._others,
            INFERENCE_SERVICE: [stream, *self._others[INFERENCE_SERVICE]],
        }
        if HEALTH_SERVICE in self._others:
            watch = StreamMethod("Watch", self._open_watch, "health")
            unrestricted[HEALTH_SERVICE] = [*self._others[HEALTH_SERVICE], watch]
        if self._reflection:
            method = StreamMethod("ServerReflectionInfo", self._open_reflection, "metadata")
            unrestricted |= {name: [method] for name in REFLECTION_SERVICES}
        services = {
            name: [restrict_method(method, self._restrictions) for method in methods]
            for name, methods in unrestricted.items()
        }
        # Its access control is in start_infer, so that an engine can call that directly.
        infer = UnaryMethod("ModelInfer", self._model_infer, "inference", self.start_infer, True)
        services[INFERENCE_SERVICE].insert(0, infer)
        return services

    def start_infer(
        self,
        data: bytes,
        done: ResponseCallback,
        context: RpcContext,
        reserved: ReservedBytes | None = None,
    ) -> Cancellable:
        """ModelInfer without a coroutine: calls `done` once, maybe before it returns.

        `reserved` is the memory of `data`, if it is counted. The engine cancels what is returned.
        Raises HostError if there is no call.
        """
        if self._inference_restricted:
            check_restriction(self._restrictions, "inference", context)
            if self._api_keys is not None:
                self._api_keys.authorize("inference", context.metadata("authorization"))
        if self._cached_responses.responses:
            answer = self._repeat_response(data)
            if answer is not None:
                done(answer)
                return _ANSWERED
        request = None
        if read_usual_request is not None:
            read = read_usual_request if type(data) is bytes else read_placed_request
            request = read(data, self._shapes)
        if request is None:
            message = parse_infer_request(data, self._core.tensor_counts)
            if len(data) >= MIN_LARGE_INPUT_BYTES and (large := message.large_inputs):
                self._open_requests.count += 1
                task = asyncio.ensure_future(
                    self._infer_large(message, large, done, context, reserved)
                )
                task.add_done_callback(lambda _: self._open_requests.request_finished())
                return task
            request = self._build_request(message)
        if reserved is not None:
            request.reserved_memory = reserved
        try:
            repeats = type(data) is bytes and len(data) <= MAX_REPEATABLE_BYTES
            kept = data if repeats and not self._reads_metadata else b""
            return self._start_request(request, done, context, data=kept)
        except NotServedError:
            if not self._core.loads_on_demand:
                raise
        self._open_requests.count += 1
        task = asyncio.ensure_future(self._infer_when_loaded(request, done, context))
        task.add_done_callback(lambda _: self._open_requests.request_finished())
        return task

    def _repeat_response(self, data: bytes) -> bytes | None:
        """The response to a ModelInfer that the response cache has answered before.

        None if the request has to take the usual path.
        """
        if self._reads_metadata or self._open_requests.draining:
            return None
        return self._cached_responses.respond(data)

    def _start_request(
        self,
        request: InferRequest,
        done: ResponseCallback,
        context: RpcContext,
        admitted: bool = False,
        data: bytes = b"",
    ) -> Call:
        """`data`: the message of the request if it is short."""
        if (
            self._reads_metadata
            or self._open_requests.draining
            or self._core.request_tracer is not None
        ):
            call = self._submit_request(request, context, True, admitted)
        else:
            call = self._core.infer(request, True)
        open_requests = self._open_requests
        open_requests.count += 1

        def finish(response: InferResponse | HostError) -> None:
            answer: bytes | HostError
            try:
                if isinstance(response, HostError):
                    answer = response
                else:
                    if request.classification is not None:
                        response = classify(response, request.classification)
                    answer = encode_infer_response(response)
                    if data and response.cache_hit is not None:
                        self._cached_responses.remember(data, request, response, answer)
            except HostError as error:
                answer = error
            open_requests.count -= 1
            if open_requests.draining:
                open_requests.signal_if_drained()
            if request.trace is None:
                done(answer)
            else:
                _send_traced(request.trace, done, answer)

        call.subscribe_single(finish)
        return call

    async def _infer_large(
        self,
        message: InferMessage,
        large: list[LargeInput],
        done: ResponseCallback,
        context: RpcContext,
        reserved: ReservedBytes | None,
    ) -> None:
        try:
            await decode_inputs(large, message.model_name)
            request = self._build_request(message)
        except Exception as error:  # the top of a call: a defect is logged and answered
            done(to_host_error(error))
            return
        request.reserved_memory = reserved
        await self._infer_when_loaded(request, done, context)

    async def _infer_when_loaded(
        self, request: InferRequest, done: ResponseCallback, context: RpcContext
    ) -> None:
        """As `_start_request`, but waits for the model if it is not loaded and loads on demand."""
        answer, deliver = _pending_answer()
        try:
            call = await self._start_when_loaded(
                request,
                context,
                lambda admitted: self._start_request(request, deliver, context, admitted),
            )
            try:
                done(await answer)
            except asyncio.CancelledError:  # the client has gone, or its deadline has passed
                call.cancel()
                raise
        except Exception as error:  # the top of a call: a defect is logged and answered
            done(to_host_error(error))

    async def _start_when_loaded(
        self, request: InferRequest, context: RpcContext, start: Callable[[bool], Call]
    ) -> Call:
        """Starts a request after its model is loaded if it loads on demand; the wait counts.

        `start` gets whether the client may send the request, so that this is not checked again.
        """
        if self._api_keys is None:
            return await self._core.start_when_loaded(request, lambda: start(False))
        client = self._find_client(self._api_keys, request, context)
        return await client.start_after_wait(
            lambda: self._core.start_when_loaded(request, lambda: start(True))
        )

    @property
    def open_requests(self) -> int:
        """Number of open inference RPCs."""
        return self._open_requests.count

    async def drain(self, timeout: float) -> bool:
        """Refuses new inference requests and waits for open ones, at most `timeout` seconds.

        Streams end with UNAVAILABLE as soon as their requests are answered. Returns False if some
        are still open.
        """
        if not self._open_requests.draining:
            for stream in list(self._streams):
                stream.finish_after_open_requests(unavailable(SHUTTING_DOWN))
            for other in list(self._standard_streams):
                other.end(unavailable("Server exiting"))
        return await self._open_requests.drain(timeout)

    def submit_stream_request(
        self, data: bytes, context: RpcContext, reserved: ReservedBytes | None
    ) -> tuple[InferMessage, str, Call | HostError | InferRequest | None]:
        """Submits a request of a stream: returns the message, its id, and its call or its error.

        None: `submit_large_request` submits it. A request: `submit_when_loaded` submits it.
        """
        message, request_id = _UNREAD, ""
        try:
            request = None
            if read_usual_request is not None:
                read = read_usual_request if type(data) is bytes else read_placed_request
                request = read(data, self._shapes)
            if request is not None:
                message = describe_usual_request(request.model_name, request.model_version)
                request_id = request.id
            else:
                message = parse_infer_request(data, self._core.tensor_counts)
                request_id = message.id
                if len(data) >= MIN_LARGE_INPUT_BYTES and message.large_inputs:
                    return message, request_id, None
                request = self._build_request(message)
            request.reserved_memory = reserved
            try:
                return message, request_id, self._submit_request(request, context, False)
            except NotServedError:
                if not self._core.loads_on_demand:
                    raise
                return message, request_id, request
        except HostError as early:
            return message, request_id, early

    async def submit_large_request(
        self, message: InferMessage, context: RpcContext, reserved: ReservedBytes | None
    ) -> Call | HostError:
        """Decodes the large inputs of a request of a stream, and submits it."""
        await decode_inputs(message.large_inputs, message.model_name)
        try:
            request = self._build_request(message)
        except HostError as early:
            return early
        request.reserved_memory = reserved
        return await self.submit_when_loaded(request, context)

    async def submit_when_loaded(
        self, request: InferRequest, context: RpcContext
    ) -> Call | HostError:
        """Submits a request of a stream, after its model is loaded if it loads on demand."""
        try:
            return await self._start_when_loaded(
                request,
                context,
                lambda admitted: self._submit_request(request, context, False, admitted),
            )
        except HostError as early:
            return early

    def is_decoupled(self, message: InferMessage) -> bool:
        """Whether the model of the message is decoupled; False if it is unknown."""
        try:
            config = self._core.model_config(message.model_name, message.model_version)
        except HostError:
            return False
        return bool(config.model_transaction_policy.decoupled)

    def _build_request(self, message: InferMessage) -> InferRequest:
        if self._open_requests.draining:
            raise unavailable(SHUTTING_DOWN)
        try:
            return to_request(message, self._core.regions)
        except HostError:
            # The version is checked before the model is looked up (docs/reference/grpc.md,
            # "Parameters of ModelInferRequest").
            parse_version(message.model_version)
            try:
                self._core.model_config(message.model_name, message.model_version)
            except NotServedError:
                if not self._core.loads_on_demand:
                    raise
            raise

    def _submit_request(
        self, request: InferRequest, context: RpcContext, unary: bool, admitted: bool = False
    ) -> Call:
        if self._open_requests.draining:
            raise unavailable(SHUTTING_DOWN)
        if self._forwards_headers:
            request.parameters.update(self._forwarding.to_parameters(context.invocation_metadata()))
        if self._api_keys is not None and not admitted:
            client = self._find_client(self._api_keys, request, context)
            return client.start_request(lambda: self._infer(request, context, unary))
        return self._infer(request, context, unary)

    @staticmethod
    def _find_client(
        keys: InferenceKeys, request: InferRequest, context: RpcContext
    ) -> InferenceClient:
        """The client of a request. Raises HostError if it may not ask the model."""
        client = keys.authorize("inference", context.metadata("authorization"))
        client.check_model(request.model_name)
        return client

    def _infer(self, request: InferRequest, context: RpcContext, unary: bool) -> Call:
        if self._core.request_tracer is not None:
            return self._infer_traced(self._core.request_tracer, request, context, unary)
        return self._core.infer(request, unary)

    def _infer_traced(
        self, tracing: RequestTracer, request: InferRequest, context: RpcContext, unary: bool
    ) -> Call:
        trace = request.trace = tracing.start_trace(request.model_name, context.metadata)
        if trace is None:
            return self._core.infer(request, unary)
        # The message is complete when it is first seen.
        trace.record_event("GRPC_WAITREAD_START")
        trace.record_event("GRPC_WAITREAD_END")
        try:
            return self._core.infer(request, unary)
        except HostError:
            trace.finish_response()
            raise

    async def _model_infer(self, data: bytes, context: RpcContext) -> bytes:
        answer, deliver = _pending_answer()
        call = self.start_infer(data, deliver, context)
        try:
            result = await answer
        except asyncio.CancelledError:  # the client has gone, or its deadline has passed
            call.cancel()
            raise
        if isinstance(result, HostError):
            raise result
        return result

    def _open_stream(self, writer: StreamWriter, context: RpcContext) -> InferStream:
        if self._open_requests.draining:
            raise unavailable(SHUTTING_DOWN)
        if self._api_keys is not None:
            self._api_keys.authorize("inference", context.metadata("authorization"))
        close_on_error = context.metadata("triton_grpc_error") == "true"
        stream = InferStream(self, writer, context, close_on_error)
        self._streams.add(stream)
        self._open_requests.count += 1
        return stream

    def _open_watch(self, writer: StreamWriter, context: RpcContext) -> StreamHandler:
        if self._open_requests.draining:
            raise unavailable(SHUTTING_DOWN)
        check = self._find_handler(HEALTH_SERVICE, "Check")
        return HealthWatch(writer, self._standard_streams, check, context)

    def _open_reflection(self, writer: StreamWriter, context: RpcContext) -> StreamHandler:
        if self._open_requests.draining:
            raise unavailable(SHUTTING_DOWN)
        services = (INFERENCE_SERVICE, HEALTH_SERVICE, *REFLECTION_SERVICES)
        authorize = None
        if self._api_keys is not None:  # a client that may read metadata may read these, too
            metadata = self._find_handler(INFERENCE_SERVICE, "ServerMetadata")
            authorize = partial(metadata, b"", context)
        return ReflectionStream(writer, self._standard_streams, services, authorize)

    def _find_handler(self, service: str, name: str) -> UnaryHandler:
        (method,) = (one for one in self._others[service] if one.name == name)
        assert isinstance(method, UnaryMethod)
        return method.handler

    def stream_closed(self, stream: InferStream) -> None:
        """Called when a stream has ended."""
        self._streams.discard(stream)
        self._open_requests.request_finished()


def _pending_answer() -> tuple[asyncio.Future[bytes | HostError], ResponseCallback]:
    """Returns an answer to wait for, and what delivers it, also after a cancellation."""
    answer: asyncio.Future[bytes | HostError] = asyncio.get_running_loop().create_future()

    def deliver(result: bytes | HostError) -> None:
        if not answer.done():
            answer.set_result(result)

    return answer, deliver


class _Answered:
    """A request that is answered already."""

    def cancel(self) -> None:
        """Does nothing."""


_ANSWERED = _Answered()
_UNREAD = InferMessage()
"""In place of a message that cannot be parsed."""


def _send_traced(trace: RequestTrace, done: ResponseCallback, answer: bytes | HostError) -> None:
    trace.record_event("GRPC_SEND_START")
    done(answer)
    trace.record_event("GRPC_SEND_END")
    trace.finish_response()
