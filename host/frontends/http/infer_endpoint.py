"""The infer endpoint: reads a request, whose tensors are views of its body, and answers it.

Large tensors are written to shared memory as they arrive.

The rules are in docs/reference/http.md, "Inference request" and "Raw binary request".
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from functools import partial
from math import prod

from host.config.schema import ModelConfig
from host.errors import HostError, internal, invalid_argument, unavailable, unsupported
from host.frontends.classification import classify
from host.frontends.compression import (
    SUPPORTED_ENCODINGS,
    choose_encoding,
    compress,
    decompress,
    decompressed_too_large,
    max_compressed_size,
)
from host.frontends.error_status import HTTP_STATUS, HttpError
from host.frontends.http.http_exchange import (
    BINARY,
    JSON,
    MAX_BYTES,
    HttpExchange,
    json_too_large,
    trace_request,
    trace_response,
)
from host.frontends.http.inference_header import (
    MAX_INLINE_BYTES,
    InferenceHeader,
    InferenceHeaderReader,
    InputHeader,
)
from host.frontends.http.json_text import SlowText, error_body
from host.frontends.http.routes import INFER, Route, find_route
from host.frontends.http.tensors import ALL_NAMES, Steps, encode_infer_response, run_in_turns
from host.frontends.http1.asgi import Header
from host.frontends.http1.cycle import STATUS_LINES
from host.frontends.http1.parser import Body, FastHandler, ResponseCallback
from host.frontends.inference_core import InferenceCore, OpenRequests, RegionLookup
from host.frontends.receive_memory import MIN_PLACED_BYTES, Placer, ReserveBlock, StartFilling
from host.frontends.request_headers import HeaderForwarding
from host.inference.call import Call
from host.inference.request import (
    Buffer,
    Classification,
    InferRequest,
    InferResponse,
    Tensor,
    serialize_bytes,
)
from host.inference.tensor_spec import wire_name
from host.models.registry import parse_version
from pb_utils._datatypes import SIZES
from stub.wire.arena import Block

_log = logging.getLogger("pbhost")


class PlacedBody(bytes):
    """The bytes of a body without the tensors that are in blocks.

    `blocks`: one for each binary tensor, None for those that are in these bytes.
    """

    blocks: list[Block | None]


class BodyPlacer(Placer):
    """Takes the bytes of a body of `size` bytes that begins with a JSON part, as they arrive."""

    def __init__(
        self,
        size: int,
        header_length: int,
        read_sizes: Callable[[bytes], Sequence[int]],
        reserve: ReserveBlock,
    ) -> None:
        """`read_sizes`: the sizes of the binary tensors after a JSON part, as many as it can read.

        Raises MemoryError.
        """
        super().__init__(size, reserve)
        self._header_length = header_length
        self._read_sizes = read_sizes
        self._sizes: Iterator[int] | None = None  # once the JSON part has arrived
        self._blocks: list[Block | None] = []
        self._keep(header_length)

    def _begin_part(self) -> None:
        if self._sizes is None:
            self._sizes = iter(self._read_sizes(bytes(self._rest.memory[: self._header_length])))
        size = next(self._sizes, None)
        if size is None:  # more than the JSON part tells of: that is an error later
            self._keep(self._left)
        elif MIN_PLACED_BYTES < size <= self._left:
            self._blocks.append(self._place(size))
        else:
            self._keep(min(size, self._left))
            self._blocks.append(None)

    def finish(self) -> bytes:
        """The body: without its blocks, if some tensors were placed."""
        if not any(self._blocks):
            return self._rest.finish()
        body = PlacedBody(self._rest.memory[: self._rest.size])
        body.blocks = self._blocks
        return body


_MIN_VIEW_BYTES = 8192  # bytes of a body; below that, copying a slice is cheaper than a memoryview


def to_request(
    head: InferenceHeader,
    model: str,
    version: int,
    body: bytes,
    header_length: int,
    regions: RegionLookup,
) -> InferRequest:
    """Builds a request from a JSON part and a body with binary data from byte `header_length`.

    Raises HostError with the texts of docs/reference/http.md, "Inference request", and
    docs/reference/protocol.md, "Shared memory".
    """
    request = InferRequest(
        model,
        [],
        version,
        head.id,
        head.output_names.copy(),
        parameters=head.parameters.copy(),
        correlation_id=head.correlation_id,
        flags=head.flags,
        priority=head.priority,
        timeout_us=head.timeout_us,
        shape=head.shape,
    )
    at, end = header_length, len(body)
    view: Buffer = body if end < _MIN_VIEW_BYTES else memoryview(body)
    blocks = iter(body.blocks) if isinstance(body, PlacedBody) else None
    for entry in head.inputs:
        if entry.region is not None:
            request.inputs.append(_shared_memory_input(entry, regions))
            continue
        data: Buffer
        if entry.data is not None:
            data = entry.data
        else:
            block = None if blocks is None else next(blocks, None)
            if block is not None:
                request.inputs.append(
                    Tensor(entry.name, entry.datatype, entry.shape.copy(), block.data, block)
                )
                continue
            start = at
            at += entry.binary_size
            if at > end:
                raise invalid_argument(
                    f"unexpected size for input '{entry.name}', expecting {at - end} additional"
                    f" bytes for model '{model}'"
                )
            data = view[start:at]
        request.inputs.append(Tensor(entry.name, entry.datatype, entry.shape.copy(), data))
    if at != end:
        raise invalid_argument(f"unexpected additional input data for model '{model}'")
    if head.places_outputs:
        _place_outputs(head, request, regions)
    return request


def _shared_memory_input(head: InputHeader, regions: RegionLookup) -> Tensor:
    """Returns an input that is in client-registered shared memory."""
    assert head.region is not None
    block = regions.find_block(*head.region)
    return Tensor(head.name, head.datatype, head.shape.copy(), block, block)


def _place_outputs(head: InferenceHeader, request: InferRequest, regions: RegionLookup) -> None:
    if isinstance(head.outputs, HostError):
        # A new error: the cached one would collect the traceback of every request.
        raise HostError(head.outputs.code, head.outputs.message)
    counts: dict[str, int] = {}
    for output in head.outputs:
        if output.classes:
            counts[output.name] = output.classes
        if output.region is not None:
            request.output_placement = request.output_placement or {}
            request.output_placement[output.name] = regions.find_block(*output.region)
    if counts:
        request.classification = Classification(counts)


def raw_request(config: ModelConfig, version: int, body: bytes, max_size: int) -> InferRequest:
    """Builds a request from a body that is the raw data of the only input of the model.

    Raises HostError INVALID_ARG with the texts of docs/reference/http.md, "Raw binary request".
    """
    name: str = config.name
    if len(config.input) != 1:
        raise _error_without_id(
            "Raw request must only have 1 input (found 1) to be deduced but got"
            f" {len(config.input)} inputs in '{name}' model configuration"
        )
    entry = config.input[0]
    if len(body) > max_size:
        raise _raw_too_large(len(body), max_size)
    datatype = wire_name(entry.data_type)
    dims = list(entry.dims)
    data = body
    if datatype == "BYTES":
        if -1 in dims or prod(dims) != 1:
            raise _error_without_id(
                f"For BYTE datatype raw input '{entry.name}', the model must have input shape [1]"
            )
        data = serialize_bytes([body])
    elif -1 in dims:
        if dims.count(-1) > 1:
            raise _error_without_id(
                f"The shape of the raw input '{entry.name}' can not be deduced because there are"
                " more than one variable-sized dimension"
            )
        rest = prod(dim for dim in dims if dim != -1) * SIZES[datatype]
        dims[dims.index(-1)] = len(body) // rest if rest else 0
    shape = [1, *dims] if config.max_batch_size > 0 else dims
    return InferRequest(name, [Tensor(entry.name, datatype, shape, data)], version)


def _raw_too_large(size: int, most: int) -> HostError:
    return invalid_argument(
        f"Raw input has a byte_size ({size} bytes) that exceeds the maximum allowed value of"
        f" {most} bytes. Use --http-max-input-size to increase the limit."
    )


def _error_without_id(text: str) -> HostError:
    """A raw request cannot have an id."""
    return invalid_argument(f"[request id: <id_unknown>] {text}")


_Answer = tuple[bytes, Sequence[Body]]
"""The head of a response, without its empty last line, and the parts of its body."""

_HEADER_LENGTH = "Inference-Header-Content-Length"
_HEADER_LENGTH_NAME = b"inference-header-content-length"
_HEAD_TEMPLATE = b"%bcontent-type: %b\r\ncontent-length: "
_JSON_HEAD = _HEAD_TEMPLATE % (STATUS_LINES[200], JSON)
_BINARY_HEAD = _HEAD_TEMPLATE % (STATUS_LINES[200], BINARY)


class InferHandler:
    """Answers inference requests with one response each.

    Most of them arrive whole and are answered without a task (`find_handler`). The others have an
    error or unusual options, or come in parts (`infer`). `max_input_size` is
    `--http-max-input-size`. `needs_task`: all requests do, as something is checked before them.
    `open_requests` counts those without a task.
    """

    def __init__(
        self,
        core: InferenceCore,
        forwarding: HeaderForwarding,
        max_input_size: int,
        needs_task: bool,
        open_requests: OpenRequests,
    ) -> None:
        self._core = core
        self._forwarding = forwarding
        self._max_input_size = max_input_size
        self._header_reader = InferenceHeaderReader(max_input_size)
        self._needs_task = needs_task or bool(forwarding)
        self._open_requests = open_requests
        self._last_url = b""
        self._last_target: tuple[str, int] | None = None

    # Without a task

    def find_handler(self, url: bytes, headers: Mapping[bytes, bytes]) -> FastHandler | None:
        """Returns the handler of requests with this head; None if they need a task."""
        if self._needs_task:
            return None
        if url != self._last_url:  # clients often ask the same model again
            self._last_url, self._last_target = url, _find_target(url.partition(b"?")[0])
        target = self._last_target
        if target is None:
            return None
        if headers.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            return None
        accepted = headers.get(b"accept-encoding")
        if accepted is not None and choose_encoding(accepted):
            return None
        length = int(headers[b"content-length"])
        header_length = headers.get(_HEADER_LENGTH_NAME, b"%d" % length)
        if (
            length > min(self._max_input_size, MAX_INLINE_BYTES)  # more comes in parts anyway
            or not header_length.isdigit()
            or not 0 < int(header_length) <= length
        ):
            return None
        return partial(self._start_request, *target, int(header_length))

    def _start_request(
        self, model: str, version: int, header_length: int, body: bytes, done: ResponseCallback
    ) -> Call | None:
        """Starts one request; `done` gets the response. None if it needs a task."""
        core, open_requests = self._core, self._open_requests
        if core.request_tracer is not None or open_requests.draining:
            return None
        try:
            head = self._header_reader.read(body[:header_length])
            request = to_request(head, model, version, body, header_length, core.regions)
            outputs_in_shared_memory = tuple(request.output_placement or ())
            call = core.infer(request, True)
        except HostError:
            return None
        open_requests.count += 1
        classes = request.classification

        def finish(response: InferResponse | HostError) -> None:
            open_requests.count -= 1
            if open_requests.draining:
                open_requests.signal_if_drained()
            if isinstance(response, HostError) and call.cancelled:
                response = unavailable("Server exiting")
            answer = _encode_answer(response, classes, head.binary_names, outputs_in_shared_memory)
            _send_in_turns(answer, done)

        call.subscribe_single(finish)
        return call

    # With a task

    async def infer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request. Raises HostError. When the task is cancelled, so is the request."""
        config = await self._core.config_when_loaded(route.resource, route.version)
        if config.model_transaction_policy.decoupled:
            raise unsupported(
                "HTTP end point doesn't support models with decoupled transaction policy"
            )
        tracing = self._core.request_tracer
        body, header_length = await self._read_body(exchange)
        version = parse_version(route.version)
        binary_names: Container[str] = ALL_NAMES
        if header_length == 0:
            request = raw_request(config, version, body, self._max_input_size)
        else:
            header_length = len(body) if header_length is None else header_length
            head = await self._header_reader.read_any(
                body[:header_length],  # without the blocks of a PlacedBody, as it may be kept
                len(config.input),
                len(config.output),
            )
            request = to_request(
                head, route.resource, version, body, header_length, self._core.regions
            )
            binary_names = head.binary_names
        if self._forwarding:
            request.parameters.update(self._forwarding.to_parameters(exchange.raw_headers()))
        del body  # the request holds the parts that it needs
        request.reserved_memory = exchange.release_body()
        outputs_in_shared_memory = request.output_placement or ()
        if tracing is None:
            response = await (await self._core.infer_when_loaded(request))
            await self._send_response(
                exchange, response, request, binary_names, outputs_in_shared_memory
            )
            return
        with trace_request(tracing, exchange, request):
            call = await self._core.infer_when_loaded(request)
            try:
                response = await call
            except HostError as error:
                with trace_response(request):
                    await exchange.send_error(error)
                return
            with trace_response(request):
                await self._send_response(
                    exchange, response, request, binary_names, outputs_in_shared_memory
                )

    async def _send_response(
        self,
        exchange: HttpExchange,
        response: InferResponse,
        request: InferRequest,
        binary_names: Container[str],
        outputs_in_shared_memory: Container[str],
    ) -> None:
        if request.classification is not None:
            response = classify(response, request.classification)
        json, chunks = await run_in_turns(
            encode_infer_response(response, binary_names, outputs_in_shared_memory)
        )
        headers: list[Header] = []
        kind = JSON
        if chunks:
            kind = BINARY
            headers.append((b"inference-header-content-length", b"%d" % len(json)))
        parts = [json, *chunks]
        accepted = exchange.headers.get(b"accept-encoding")
        if accepted is not None:
            encoding = choose_encoding(accepted)
            if encoding:
                parts = [await compress(parts, encoding)]
                headers.append((b"content-encoding", encoding.encode()))
        await exchange.send_response(kind, parts, headers)

    async def _read_body(self, exchange: HttpExchange) -> tuple[bytes, int | None]:
        """Returns the decompressed body, and the length of its JSON part, None for all.

        A body that declares too large a size is refused before it is read.
        """
        encoding = exchange.headers.get(b"content-encoding", b"identity").decode("latin-1")
        if encoding in SUPPORTED_ENCODINGS:
            most = max_compressed_size(self._max_input_size)
            packed = await exchange.read_body(
                most, lambda size: decompressed_too_large(self._max_input_size)
            )
            body = await decompress(packed, self._max_input_size, exchange.reserved)
            header_length = exchange.length_header(_HEADER_LENGTH)
        elif encoding not in ("", "identity"):
            supported = (b"accept-encoding", b"gzip, deflate")
            raise HttpError("Unsupported compression type", 501, (supported,))
        else:
            declared = exchange.content_length()
            header_length = exchange.length_header(_HEADER_LENGTH)
            if declared is not None:
                _check_header_size(header_length, declared)
            body = await self._read_plain_body(exchange, header_length)
        _check_header_size(header_length, len(body))
        size = len(body) if header_length is None else header_length
        if size > self._max_input_size:
            raise self._json_too_large(size)
        return body, header_length

    async def _read_plain_body(self, exchange: HttpExchange, header_length: int | None) -> bytes:
        if header_length is None:
            return await exchange.read_body(self._max_input_size, self._json_too_large)
        if header_length == 0:
            most = self._max_input_size
            return await exchange.read_body(most, lambda size: _raw_too_large(size, most))
        if header_length > self._max_input_size:
            raise self._json_too_large(header_length)
        fill: StartFilling | None = None
        reserve = exchange.budget.reserve_block
        if reserve is not None:
            length = header_length  # narrowed for the closure
            fill = lambda size: BodyPlacer(size, length, self._binary_sizes, reserve)  # noqa: E731
        return await exchange.read_body(MAX_BYTES, _content_length_too_large, fill)

    def _binary_sizes(self, header: bytes) -> list[int]:
        """The sizes of the binary inputs of a JSON part; none of one that is invalid or unusual."""
        if len(header) > MAX_INLINE_BYTES:
            return []
        try:
            head = self._header_reader.read(header)
        except (HostError, SlowText):
            return []
        return [
            entry.binary_size
            for entry in head.inputs
            if entry.region is None and entry.data is None
        ]

    def _json_too_large(self, size: int) -> HostError:
        return json_too_large(size, self._max_input_size)


def _content_length_too_large(size: int) -> HostError:
    return invalid_argument(
        "Unable to parse Content-Length, value is out of range [ -2147483648, 2147483647 ],"
        f" got: {size}"
    )


def _check_header_size(size: int | None, whole: int) -> None:
    if size is not None and not 0 <= size <= whole:
        raise invalid_argument(
            f"inference header size should be in range (0, {whole}), got: {size}"
        )


def _find_target(path: bytes) -> tuple[str, int] | None:
    """The model and version that inference requests to this path are for; None for other paths."""
    route = find_route(path)
    if route is None or route.endpoint is not INFER:
        return None
    try:
        return route.resource, parse_version(route.version)
    except HostError:
        return None


def _send_in_turns(answer: Steps[_Answer], done: ResponseCallback) -> None:
    """Passes an answer to `done`: at once if it takes one step, else after turns of the loop."""
    try:
        next(answer)
    except StopIteration as ended:
        done(*ended.value)
    else:
        asyncio.get_running_loop().call_soon(_send_in_turns, answer, done)


def _encode_answer(
    response: InferResponse | HostError,
    classes: Classification | None,
    binary_names: Container[str],
    outputs_in_shared_memory: Container[str],
) -> Steps[_Answer]:
    """Returns the answer to a response, or to its error. Raises nothing."""
    try:
        if isinstance(response, HostError):
            return _encode_error(response)
        if classes is not None:
            response = classify(response, classes)
        json, chunks = yield from encode_infer_response(
            response, binary_names, outputs_in_shared_memory
        )
        if not chunks:
            return b"%b%d\r\n" % (_JSON_HEAD, len(json)), (json,)
        parts: list[Body] = [json]
        size = len(json)
        for chunk in chunks:
            part = chunk if type(chunk) is bytes else memoryview(chunk).cast("B")
            size += len(part)
            parts.append(part)
        head = b"%b%d\r\n%b: %d\r\n" % (_BINARY_HEAD, size, _HEADER_LENGTH_NAME, len(json))
        return head, parts
    except HostError as error:
        return _encode_error(error)
    except Exception:  # a defect of ours; the client must get an answer
        _log.exception("unexpected failure of an HTTP request")
        return _encode_error(internal("unexpected failure"))


def _encode_error(error: HostError) -> _Answer:
    body = error_body(error.message or error.code.value)
    head = _HEAD_TEMPLATE % (STATUS_LINES[HTTP_STATUS[error.code]], JSON)
    return b"%b%d\r\n" % (head, len(body)), (body,)
