"""What both clients do, as generators: they yield RPCs and pauses, which a client carries out.

So the blocking client and that for asyncio have one implementation, without threads or an event
loop.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Callable, Generator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, TypeVar

from tritonclient.grpc import service_pb2 as pb

from host.client.channel import ChannelSettings, Metadata, Rpc, to_metadata
from host.client.messages import (
    EMPTY_FINAL,
    UNKNOWN_MODEL,
    RequestOptions,
    add_input,
    take_final,
    to_message,
    to_result,
    unfit_request,
    written_version,
)
from host.client.places import OutputSizes, Places
from host.client.shared_memory import Region, Regions
from host.client.signature import LARGE, EncodedTensor, Signature, TensorSpec, Value
from host.config.json_form import to_dict
from host.errors import ErrorCode, HostError, internal, invalid_argument, unsupported
from host.inference.request import Parameter, Result

_UNKNOWN_REGION = "Unable to find shared memory region"
_DECOUPLED = "doesn't support models with decoupled transaction policy"
_SMALL_REGION = "shared memory size specified with the request for output"
_UNCERTAIN = (
    ErrorCode.DEADLINE_EXCEEDED,
    ErrorCode.CANCELLED,
    ErrorCode.UNAVAILABLE,
    ErrorCode.UNKNOWN,
)
_TRANSPORT_TEXTS = "RST_STREAM", "http2 header"  # of gRPC's own INTERNAL errors
_RAN = "while it ran this request"
_FIRST_PAUSE = 0.1
_MAX_PAUSE = 5.0
_CLOSE_SECONDS = 5.0
_LOAD_SECONDS = 600.0
_MAX_SECONDS = 365 * 86400  # gRPC takes much longer timeouts for none at all
_STALE_CODES = ErrorCode.INVALID_ARG, ErrorCode.NOT_FOUND
"""Errors of requests that do not fit the model."""


class Pause(NamedTuple):
    """Time to wait."""

    seconds: float


def _is_uncertain(error: HostError) -> bool:
    """Whether the server may still use the memory of the request."""
    return error.code in _UNCERTAIN or any(text in error.message for text in _TRANSPORT_TEXTS)


_Result = TypeVar("_Result")
Steps = Generator[Rpc | Pause, Any, _Result]
"""Gets the response of an RPC, or its HostError; None after a pause."""


class Deadline:
    """When the RPCs of a call must have ended."""

    def __init__(self, seconds: float | None) -> None:
        """Raises HostError INVALID_ARG."""
        if seconds is not None and not seconds > 0:
            raise invalid_argument(f"expected a timeout of more than 0 seconds, got {seconds!r}")
        if seconds is None or seconds == math.inf:
            self._end = None
        else:
            self._end = time.monotonic() + min(seconds, _MAX_SECONDS)

    def left(self) -> float | None:
        """Seconds that are left; None without a limit."""
        return None if self._end is None else max(0.0, self._end - time.monotonic())


class Retries:
    """The pauses before repetitions of one RPC."""

    def __init__(self, count: int, deadline: Deadline) -> None:
        self._left = count
        self.deadline = deadline
        self._pause = _FIRST_PAUSE

    def next_pause(self, error: HostError) -> float | None:
        """Seconds until the next try; None if the error is final.

        A request whose stub died is not sent again: it may well be the reason.
        """
        if error.code is not ErrorCode.UNAVAILABLE or not self._left or _RAN in error.message:
            return None
        pause = self._pause * random.uniform(0.8, 1.2)
        left = self.deadline.left()
        if left is not None and pause >= left:
            return None
        self._left -= 1
        self._pause = min(_MAX_PAUSE, 3 * self._pause)
        return pause


class Exchange:
    """The knowledge of one client about its server, and its calls as steps."""

    def __init__(
        self, settings: ChannelSettings, timeout: float | None, retries: int, shared_memory: bool
    ) -> None:
        Deadline(timeout)  # checks it
        if retries < 0:
            raise invalid_argument(f"expected 0 or more retries, got {retries}")
        self.settings = settings
        self.timeout = timeout
        self._retries = retries
        self._regions = Regions(shared_memory)
        self._output_sizes = OutputSizes()
        self._signatures: dict[tuple[str, str], Signature] = {}

    # Calls

    def call(self, method: str, message: Any, timeout: float | None = None) -> Steps[Any]:
        """Carries out an RPC that may be repeated. Raises HostError."""
        return self._call(method, message, self._deadline(timeout), self.settings.metadata)

    def is_ready(self, model: str, version: int) -> Steps[bool]:
        """Whether the server, or a model of it, takes requests. Raises HostError."""
        if not model:
            return bool((yield from self.call("ServerReady", pb.ServerReadyRequest())).ready)
        request = pb.ModelReadyRequest(name=model, version=written_version(version))
        return bool((yield from self.call("ModelReady", request)).ready)

    def read_metadata(self, model: str, version: int) -> Steps[dict[str, Any]]:
        """The metadata of the server or of a model, as JSON has them. Raises HostError."""
        if not model:
            return to_dict((yield from self.call("ServerMetadata", pb.ServerMetadataRequest())))
        request = pb.ModelMetadataRequest(name=model, version=written_version(version))
        return to_dict((yield from self.call("ModelMetadata", request)))

    def read_config(self, model: str, version: int) -> Steps[dict[str, Any]]:
        """The configuration of a model, as JSON has it. Raises HostError."""
        request = pb.ModelConfigRequest(name=model, version=written_version(version))
        return to_dict((yield from self.call("ModelConfig", request)).config)

    def list_models(self) -> Steps[list[dict[str, Any]]]:
        """Name, version, state and reason of each version in the repository. Raises HostError."""
        answer = yield from self.call("RepositoryIndex", pb.RepositoryIndexRequest())
        return [to_dict(model) for model in answer.models]

    def load_model(
        self, model: str, config: str, files: Mapping[str, bytes], timeout: float | None
    ) -> Steps[None]:
        """Loads a model. Raises HostError."""
        request = pb.RepositoryModelLoadRequest(model_name=model)
        if config:
            request.parameters["config"].string_param = config
        for path, content in files.items():
            request.parameters[f"file:{path}"].bytes_param = content
        yield from self.call("RepositoryModelLoad", request, self._load_timeout(timeout))

    def unload_model(
        self, model: str, unload_dependents: bool, timeout: float | None
    ) -> Steps[None]:
        """Unloads a model. Raises HostError."""
        request = pb.RepositoryModelUnloadRequest(model_name=model)
        if unload_dependents:
            request.parameters["unload_dependents"].bool_param = True
        yield from self.call("RepositoryModelUnload", request, self._load_timeout(timeout))

    def infer(self, options: RequestOptions, values: Mapping[str, Value]) -> Steps[Result]:
        """Sends a request to a model and returns its response. Raises HostError."""
        deadline = self._deadline(options.timeout)
        metadata = self._metadata(options)
        for _ in range(2):
            signature, inputs = yield from self._encode(options, values, deadline)
            try:
                result = yield from self._send(signature, inputs, options, deadline)
            except HostError as error:
                if error.message.endswith(_DECOUPLED):
                    raise unsupported(f"{error.message}; use `stream` of the client") from None
                if error.code not in _STALE_CODES:
                    raise
                # The request may fit a model that has been replaced.
                self._forget(options)
                if not options.retried:
                    raise
                renewed = yield from self._read_signature(options, deadline, metadata)
                if renewed == signature:
                    raise
            else:
                if str(result.model_version) not in signature.versions:
                    self._forget(options)
                return result
        raise internal(f"model '{options.model}' changes faster than a request can be sent")

    def prepare_stream(
        self, options: RequestOptions, values: Mapping[str, Value]
    ) -> Steps[StreamState]:
        """Returns the request of a stream. Raises HostError."""
        if self.settings.over_http:
            raise unsupported(
                f"{self.settings.url}: HTTP has no streams of tensors; use the address of the gRPC"
                " port, grpc://HOST:PORT"
            )
        deadline = Deadline(options.timeout)
        signature, inputs = yield from self._encode(options, values, deadline)
        message = to_message(options, signature)
        message.parameters[EMPTY_FINAL].bool_param = True
        # With this, an error of the model has a status.
        metadata = (*self._metadata(options), ("triton_grpc_error", "true"))
        retries = self.retries(options.retried, deadline)
        # Only now, as an invalid argument must not keep a region.
        places, region = Places(inputs), None
        if self._regions.usable and places.size:
            region = yield from self._take_region(places.size, deadline)
        return StreamState(message, inputs, metadata, retries, self._regions, region)

    def retries(self, retried: bool, deadline: Deadline) -> Retries:
        """The repetitions of one RPC."""
        return Retries(self._retries if retried else 0, deadline)

    def close(self) -> Steps[None]:
        """Unregisters what was registered; a server that does not respond has forgotten it."""
        for name in self._regions.close():
            message = pb.SystemSharedMemoryUnregisterRequest(name=name)
            try:
                yield Rpc(
                    "SystemSharedMemoryUnregister", message, _CLOSE_SECONDS, self.settings.metadata
                )
            except HostError as error:
                if _is_uncertain(error):
                    return

    def _load_timeout(self, timeout: float | None) -> float | None:
        return _LOAD_SECONDS if timeout is None and self.timeout is not None else timeout

    def _deadline(self, timeout: float | None) -> Deadline:
        return Deadline(self.timeout if timeout is None else timeout)

    def _metadata(self, options: RequestOptions) -> Metadata:
        if not options.headers:
            return self.settings.metadata
        return (*self.settings.metadata, *to_metadata(options.headers, self.settings.over_http))

    def _call(
        self,
        method: str,
        message: Any,
        deadline: Deadline,
        metadata: Metadata,
    ) -> Steps[Any]:
        retries = None
        while True:
            try:
                return (yield Rpc(method, message, deadline.left(), metadata))
            except HostError as error:
                retries = retries or self.retries(True, deadline)
                pause = retries.next_pause(error)
                if pause is None:
                    raise
            yield Pause(pause)

    # Metadata of models

    def _encode(
        self, options: RequestOptions, values: Mapping[str, Value], deadline: Deadline
    ) -> Steps[tuple[Signature, list[EncodedTensor]]]:
        """Returns the inputs as tensors; an error may be due to a model that has changed."""
        if options.classes:
            options.check_classes()
        key = options.model, options.written_version
        known = signature = self._signatures.get(key)
        while True:
            if signature is None:
                signature = yield from self._read_when_loaded(
                    options, deadline, self._metadata(options)
                )
            try:
                inputs = signature.encode(values)
                signature.check_outputs((*options.outputs, *options.classes))
                return signature, inputs
            except HostError:
                if known is None:
                    raise
                signature = known = None

    def _forget(self, options: RequestOptions) -> None:
        self._signatures.pop((options.model, options.written_version), None)

    def _read_when_loaded(
        self, options: RequestOptions, deadline: Deadline, metadata: Metadata
    ) -> Steps[Signature]:
        """As `_read_signature`; a model that loads on demand is loaded by a request it refuses."""
        try:
            return (yield from self._read_signature(options, deadline, metadata))
        except HostError as error:
            if not error.message.startswith(UNKNOWN_MODEL):
                raise
            refusal = error
        message = unfit_request(options.model, options.written_version)
        try:
            yield from self._call("ModelInfer", message, deadline, metadata)
        except HostError as error:
            refusal = error
        try:
            return (yield from self._read_signature(options, deadline, metadata))
        except HostError:
            raise refusal from None

    def _read_signature(
        self, options: RequestOptions, deadline: Deadline, metadata: Metadata
    ) -> Steps[Signature]:
        name, version = options.model, options.written_version
        described = yield from self._call(
            "ModelMetadata", pb.ModelMetadataRequest(name=name, version=version), deadline, metadata
        )
        try:
            answer = yield from self._call(
                "ModelConfig", pb.ModelConfigRequest(name=name, version=version), deadline, metadata
            )
            config = answer.config
        except HostError as error:
            # Not every server shows configurations; metadata are enough, but do not say all.
            if error.code in (ErrorCode.UNAUTHENTICATED, ErrorCode.DEADLINE_EXCEEDED):
                raise
            config = None
        optional = (
            {entry.name: entry.optional for entry in config.input} if config is not None else {}
        )
        signature = Signature(
            name,
            tuple(described.versions),
            {
                entry.name: TensorSpec(
                    entry.name, entry.datatype, tuple(entry.shape), optional.get(entry.name, True)
                )
                for entry in described.inputs
            },
            {
                entry.name: TensorSpec(entry.name, entry.datatype, tuple(entry.shape))
                for entry in described.outputs
            },
            config.max_batch_size if config is not None else 0,
        )
        self._signatures[name, version] = signature
        return signature

    # One request

    def _send(
        self,
        signature: Signature,
        inputs: Sequence[EncodedTensor],
        options: RequestOptions,
        deadline: Deadline,
    ) -> Steps[Result]:
        retries = None
        while True:
            try:
                return (yield from self._send_once(signature, inputs, options, deadline))
            except HostError as error:
                retries = retries or self.retries(options.retried, deadline)
                pause = retries.next_pause(error)
                if pause is None:
                    raise
            yield Pause(pause)

    def _send_once(
        self,
        signature: Signature,
        inputs: Sequence[EncodedTensor],
        options: RequestOptions,
        deadline: Deadline,
    ) -> Steps[Result]:
        message = to_message(options, signature)  # an invalid argument must not keep a region
        if self._regions.usable and self._may_use_region(signature, inputs):
            places = Places(inputs)
            places.expect_outputs(signature, options, self._output_sizes)
            region = None
            if places.size:
                region = yield from self._take_region(places.size, deadline)
            if region is not None:
                result = yield from self._send_by_region(
                    region, places, message, inputs, options, deadline
                )
                if result is not None:
                    return result
                message = to_message(options, signature)
        for tensor in inputs:
            add_input(message, tensor)
        response = yield Rpc("ModelInfer", message, deadline.left(), self._metadata(options))
        result = to_result(response)
        if self._regions.usable:
            self._output_sizes.observe(options.model, inputs, result)
        return result

    def _may_use_region(self, signature: Signature, inputs: Sequence[EncodedTensor]) -> bool:
        if signature.has_large_outputs or self._output_sizes.known:
            return True
        for tensor in inputs:
            if tensor.byte_size >= LARGE:
                return True
        return False

    def _send_by_region(
        self,
        region: Region,
        places: Places,
        message: Any,
        inputs: Sequence[EncodedTensor],
        options: RequestOptions,
        deadline: Deadline,
    ) -> Steps[Result | None]:
        """As `_send_once`; returns None if the tensors have to go in the message."""
        release = self._regions.give_back
        try:
            places.fill(message, region)
            rpc = Rpc("ModelInfer", message, deadline.left(), self._metadata(options))
            release = self._regions.abandon  # also if this is interrupted
            response = yield rpc
            release = self._regions.give_back
            result = to_result(response, region, places.outputs)
            self._output_sizes.observe(options.model, inputs, result)
            return result
        except HostError as error:
            if _UNKNOWN_REGION in error.message:
                release = self._regions.lose
                return None
            if not _is_uncertain(error):
                release = self._regions.give_back
            if _SMALL_REGION not in error.message or not options.retried:
                raise
            return None  # the response in the message also tells the size that differs
        finally:
            release(region)

    def _take_region(self, size: int, deadline: Deadline) -> Steps[Region | None]:
        """Returns a registered region; None where there is none."""
        region = self._regions.take(size) or self._regions.create(size)
        if region is None or region.registered:
            return region
        message = pb.SystemSharedMemoryRegisterRequest(
            name=region.name, key=region.key, offset=0, byte_size=region.size
        )
        try:
            yield Rpc(
                "SystemSharedMemoryRegister", message, deadline.left(), self.settings.metadata
            )
            region.registered = True
            region.unlink()
            return region
        except HostError as error:  # as from a server on another machine
            if not _is_uncertain(error):
                self._regions.usable = False
            return None
        finally:
            if not region.registered:
                self._regions.discard(region)


class StreamState:
    """A request whose responses are a stream, and how far they have come.

    `ended`: whether no more responses come.
    """

    def __init__(
        self,
        message: Any,
        inputs: Sequence[EncodedTensor],
        metadata: Metadata,
        retries: Retries,
        regions: Regions,
        region: Region | None,
    ) -> None:
        self._message = message
        self._inputs = inputs
        self._metadata = metadata
        self._retries = retries
        self._regions = regions
        self._region = region
        self._begun = self.ended = False
        self._fill()

    def _fill(self) -> None:
        del self._message.inputs[:], self._message.raw_input_contents[:]
        if self._region is not None:
            Places(self._inputs).fill(self._message, self._region)
        else:
            for tensor in self._inputs:
                add_input(self._message, tensor)

    def next_rpc(self) -> Rpc:
        """Returns the RPC to open the stream with."""
        timeout = self._retries.deadline.left()
        return Rpc("ModelStreamInfer", self._message, timeout, self._metadata)

    def received(self, answer: Any) -> Result | None:
        """Returns a response; None if it is empty. Raises HostError if it is an error."""
        if answer.error_message:
            raise HostError(ErrorCode.UNKNOWN, answer.error_message)
        self._begun = True
        response = answer.infer_response
        final = take_final(response)
        result = to_result(response) if response.outputs or not final else None
        if final:
            self.end(self._regions.give_back)
        return result

    def failed(self, error: HostError) -> float:
        """Returns seconds until the request is sent again. Raises an error that is final."""
        if self._region is not None and not self._begun and _UNKNOWN_REGION in error.message:
            self._regions.lose(self._region)
            self._region = None
            self._fill()
            return 0.0
        pause = None if self._begun else self._retries.next_pause(error)
        if pause is None:
            uncertain = _is_uncertain(error)
            self.end(self._regions.abandon if uncertain else self._regions.give_back)
            raise error
        return pause

    def cancelled(self) -> None:
        """Nobody waits for responses any more; the model may still read the request."""
        self.end(self._regions.abandon)

    def completed(self) -> None:
        """The server has ended the stream."""
        self.end(self._regions.give_back)

    def end(self, release: Callable[[Region], None]) -> None:
        """Ends the stream and lets the region go."""
        self.ended = True
        region, self._region = self._region, None
        if region is not None:
            release(region)


class SequenceState:
    """The correlation id of a sequence, and which of its requests comes next.

    `streamed`: whether the last request had a stream.
    """

    def __init__(self, options: RequestOptions, id: int | str) -> None:
        self._options = replace(options, retried=False)
        self._id = id or secrets.randbits(62) + 1
        self._last: Mapping[str, Value] | None = None
        self._ended = False
        self.streamed = False

    @property
    def timeout(self) -> float | None:
        """The timeout of requests without one of their own."""
        return self._options.timeout

    def next_request(
        self,
        end: bool,
        request_id: str = "",
        outputs: Sequence[str] = (),
        parameters: Mapping[str, Parameter] | None = None,
        timeout: float | None = None,
    ) -> RequestOptions:
        """Returns the options of the next request. Raises HostError after the last one."""
        if self._ended:
            raise invalid_argument("this sequence has ended; open another one")
        options = self._options
        return replace(
            options,
            request_id=request_id,
            outputs=outputs,
            parameters={
                **(parameters or {}),
                "sequence_id": self._id,
                "sequence_start": self._last is None,
                "sequence_end": end,
            },
            timeout=self.timeout if timeout is None else timeout,
        )

    def sent(self, values: Mapping[str, Value], end: bool, streamed: bool = False) -> None:
        """The server has a request."""
        self._last, self._ended, self.streamed = values, end, streamed

    def values_for_end(self) -> Mapping[str, Value] | None:
        """Inputs for a request that ends the sequence; None if it has ended, or has not begun."""
        return None if self._ended else self._last
