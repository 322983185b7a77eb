"""Answers `POST /v1/embeddings`: texts in, vectors out.

Most requests have one text and are answered without a task. Requests with an error, with several
texts, or with unusual options have one.
"""

from __future__ import annotations

import asyncio
import base64
import logging
import math
import uuid
from collections.abc import Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from host.core import Core
from host.errors import HostError, unavailable, unexpected_failure
from host.frontends.http import json_text as json
from host.frontends.http.http_exchange import JSON, HttpExchange, trace_response
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.http.routes import Route
from host.frontends.http1.cycle import STATUS_LINES
from host.frontends.http1.parser import FastHandler, ResponseCallback
from host.frontends.inference_core import OpenRequests
from host.frontends.openai.bodies import BodyReader, set_request_id, visible_request_id
from host.frontends.openai.contract import Contract, Input
from host.frontends.openai.fields import (
    EMBEDDINGS,
    Fields,
    check_fields,
    model_name,
    parse_object,
    too_deep,
)
from host.frontends.openai.inference_handler import Handler, gather
from host.frontends.openai.inputs import build_parameters, dump_text, encode_input, set_scheduling
from host.frontends.openai.model_directory import ModelDirectory
from host.frontends.openai.openai_errors import (
    from_host_error,
    invalid_value,
    model_failure,
    unsupported_field,
)
from host.frontends.openai.outputs import read_number, read_texts
from host.frontends.request_headers import HeaderForwarding
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor, copy_from_shared_memory

PATH = b"/v1/embeddings"

Vectors = npt.NDArray[np.float32]

_MAX_CALLS = 64  # of one request at a time
_DTYPES = {"FP16": "<f2", "FP64": "<f8"}
_JSON_REQUEST = "embedding_request"
"""The source of the input that takes the request of one text as JSON."""

_COUNTS = ("prompt_tokens", "num_input_tokens")

_log = logging.getLogger("pbhost")
_HEAD = b"%bcontent-type: %b\r\ncontent-length: %d\r\nx-request-id: %b\r\n"


class EmbeddingsHandler(Handler):
    """Answers embeddings requests, without a task (`find_handler`) or with one (`answer`).

    `needs_task`: all requests do, as something is checked before them. `open_requests` counts those
    without a task.
    """

    def __init__(
        self,
        core: Core,
        models: ModelDirectory,
        bodies: BodyReader,
        forwarding: HeaderForwarding,
        needs_task: bool,
        open_requests: OpenRequests,
    ) -> None:
        super().__init__(core, models, bodies, forwarding)
        self._needs_task = needs_task or bool(forwarding)
        self._open_requests = open_requests
        self._writers: set[asyncio.Task[None]] = set()

    # Without a task

    def find_handler(self, url: bytes, headers: Mapping[bytes, bytes]) -> FastHandler | None:
        """Returns the handler of requests with this head; None if they need a task."""
        if self._needs_task:
            return None
        if url.partition(b"?")[0] != PATH:
            return None
        if headers.get(b"content-encoding", b"identity") not in (b"", b"identity"):
            return None
        length = int(headers[b"content-length"])
        if length > MAX_INLINE_BYTES or not self._bodies.allows(length):
            return None
        given_id = visible_request_id(headers.get(b"x-request-id"))
        return partial(self._start_request, given_id)

    def _start_request(self, given_id: str, body: bytes, done: ResponseCallback) -> Call | None:
        """Starts one request; None if it needs a task, which also reports its error."""
        core = self._core
        if core.request_tracer is not None or self._open_requests.draining:
            return None
        try:
            core.refuse_while_loading()
            sent = parse_object(body)
            if type(sent.get("input")) is not str:
                return None
            name = model_name(sent)
            contract, version = self._models.find(name, EMBEDDINGS)
            if contract.decoupled:
                return None
            fields, _, (request,) = prepare_requests(contract, sent, version, self._bodies)
            request.id = given_id or new_request_id()
            call = core.infer(request)
        except HostError:
            return None
        self._open_requests.count += 1
        request_id = request.id.encode()

        def finish(response: InferResponse | HostError) -> None:
            self._open_requests.request_finished()
            if isinstance(response, HostError):
                ended = call.cancelled
                error = unavailable("Server exiting") if ended else response
                done(*_error_answer(error, request_id))
            elif output_size(response) <= MAX_INLINE_BYTES:
                done(*_answer(contract, fields, name, response, request_id))
            else:
                self._write_in_thread(contract, fields, name, response, request_id, done)

        call.subscribe_single(finish)
        return call

    def _write_in_thread(
        self,
        contract: Contract,
        fields: Fields,
        name: str,
        response: InferResponse,
        request_id: bytes,
        done: ResponseCallback,
    ) -> None:
        async def write() -> None:
            done(*await asyncio.to_thread(_answer, contract, fields, name, response, request_id))

        task = asyncio.create_task(write())
        self._writers.add(task)
        task.add_done_callback(self._writers.discard)

    # With a task

    async def answer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request. Raises OpenAIError or HostError."""
        size, sent, name = await self._bodies.read(exchange)
        contract, version = await self._models.find_when_loaded(name, EMBEDDINGS, exchange.client)
        if size > MAX_INLINE_BYTES:
            prepare = asyncio.to_thread(prepare_requests, contract, sent, version, self._bodies)
            fields, texts, requests = await prepare
        else:
            fields, texts, requests = prepare_requests(contract, sent, version, self._bodies)
        request_id = set_request_id(exchange, new_request_id())
        for request in requests:
            request.id = request_id
        with self._trace(exchange, requests):
            responses = await self._infer_all(contract, requests)
            # Few short vectors are written faster than a thread starts.
            few = sum(output_size(response) for response in responses) <= MAX_INLINE_BYTES
            arguments = (contract, fields, len(texts), name, responses)
            body = (
                write_answer(*arguments)
                if few
                else await asyncio.to_thread(write_answer, *arguments)
            )
            with trace_response(requests[0]):
                await exchange.send_response(JSON, (body,))

    async def _infer_all(
        self, contract: Contract, requests: Sequence[InferRequest]
    ) -> list[InferResponse]:
        """Returns the responses in order. An error of one request cancels the others."""
        if len(requests) == 1:
            return [await self._infer(contract, requests[0])]
        free = asyncio.Semaphore(_MAX_CALLS)

        async def infer(request: InferRequest) -> InferResponse:
            async with free:
                return await self._infer(contract, request)

        return await gather(map(infer, requests))

    async def _infer(self, contract: Contract, request: InferRequest) -> InferResponse:
        if not contract.decoupled:
            return await (await self._core.infer_when_loaded(request))
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                if response.outputs:
                    return response
        raise model_failure("the model gave no embedding")


def new_request_id() -> str:
    """Returns the id of a request whose client gave none."""
    return f"embd-{uuid.uuid4().hex}"


def prepare_requests(
    contract: Contract, sent: Fields, version: int, bodies: BodyReader
) -> tuple[Fields, list[Any], list[InferRequest]]:
    """Checks the fields; returns them, the texts, and the requests for the texts.

    Raises OpenAIError.
    """
    fields = check_fields(sent, EMBEDDINGS, contract.defaults)
    value = fields["input"]
    takes_json = contract.takes(_JSON_REQUEST)
    is_one = isinstance(value, str) or isinstance(value[0], int)
    texts = [value] if is_one else value
    if not takes_json and not all(isinstance(text, str) for text in texts):
        raise unsupported_field(
            f"model '{contract.model}' takes text, not token ids; with LangChain, set"
            " check_embedding_ctx_length=False",
            "input",
        )
    if len(texts) > 1:  # every text gets all other fields
        others = {field: value for field, value in fields.items() if field != "input"}
        try:
            bodies.check_size(len(json.dump(others)) * len(texts))
        except RecursionError:
            raise too_deep() from None
    if takes_json:
        requests = [_json_request(contract, fields, text, version) for text in texts]
        for request in requests:
            set_scheduling(request, contract, fields)
        return fields, texts, requests
    entry = _text_input(contract)
    size = _texts_per_request(contract, entry)
    parameters = build_parameters(contract, fields, EMBEDDINGS, _filled(contract))
    requests = []
    for start in range(0, len(texts), size):
        part = texts[start : start + size]
        inputs = [_encode_texts(entry, part, contract.max_batch_size > 0)]
        for other in contract.inputs:
            given = True if other.source == "yes" else fields.get(other.source)
            if other is not entry and given is not None:
                tensor = encode_input(other, given)
                if contract.max_batch_size > 0:  # every text of the batch gets the same value
                    assert isinstance(tensor.data, bytes)
                    tensor.shape[0], tensor.data = len(part), tensor.data * len(part)
                inputs.append(tensor)
        request = InferRequest(contract.model, inputs, version, parameters=dict(parameters))
        request.requested_outputs = _wanted_outputs(contract, "embedding")
        set_scheduling(request, contract, fields)
        requests.append(request)
    return fields, texts, requests


def _json_request(contract: Contract, fields: Fields, text: Any, version: int) -> InferRequest:
    """Builds the request for one text, or its token ids, in the form of the vLLM backend."""
    content: dict[str, Any] = {"input": text}
    if "dimensions" in fields:
        content["pooling_params"] = {"dimensions": [fields["dimensions"]]}
    inputs = []
    for entry in contract.inputs:
        if entry.source == _JSON_REQUEST:
            inputs.append(encode_input(entry, dump_text(content)))
        elif entry.source == "yes":
            inputs.append(encode_input(entry, True))
    parameters = build_parameters(contract, fields, EMBEDDINGS, {_JSON_REQUEST})
    request = InferRequest(contract.model, inputs, version, parameters=parameters)
    request.requested_outputs = _wanted_outputs(contract, "text")
    return request


def _wanted_outputs(contract: Contract, meaning: str) -> list[str]:
    wanted = (meaning, "num_input_tokens")
    return [name for name, given in contract.outputs.items() if given in wanted]


def _filled(contract: Contract) -> set[str]:
    return {entry.source for entry in contract.inputs}


def _text_input(contract: Contract) -> Input:
    return next(entry for entry in contract.inputs if entry.source in ("input", "prompt"))


def _texts_per_request(contract: Contract, entry: Input) -> int:
    """Returns how many texts a request has: a batch, all of them for `[-1]`, or one."""
    if contract.max_batch_size > 0:
        return contract.max_batch_size
    return 1 << 31 if -1 in entry.dims else 1


def _encode_texts(entry: Input, texts: list[str], batched: bool) -> Tensor:
    tensor = encode_input(Input(entry.name, entry.source, entry.datatype, (-1,)), texts)
    shape = [1 if dim == -1 else dim for dim in entry.dims]
    shape[0 if batched or -1 not in entry.dims else entry.dims.index(-1)] = len(texts)
    tensor.shape = shape
    return tensor


def write_answer(
    contract: Contract, fields: Fields, count: int, name: str, responses: Sequence[InferResponse]
) -> bytes:
    """Writes the answer. Raises OpenAIError."""
    vectors: list[Vectors] = []
    for response in responses:
        for tensor in response.outputs:
            meaning = contract.outputs.get(tensor.name)
            if meaning == "embedding":
                vectors.extend(read_vectors(contract.model, tensor))
            elif meaning == "text":
                vectors.extend(_read_json_vectors(contract.model, tensor))
    if len(vectors) != count:
        raise model_failure(
            f"model '{contract.model}' gave {len(vectors)} embeddings for {count} texts"
        )
    wanted = fields.get("dimensions")
    given_dimensions = contract.takes("dimensions") or contract.takes(_JSON_REQUEST)
    if wanted is not None and not given_dimensions and wanted != len(vectors[0]):
        raise invalid_value(
            f"'dimensions' must be {len(vectors[0])}, which model '{contract.model}' gives, got"
            f" {wanted}",
            "dimensions",
        )
    as_text = fields.get("encoding_format") == "base64"
    if not as_text and not all(np.isfinite(vector).all() for vector in vectors):
        raise model_failure(
            f"model '{contract.model}' gave an embedding with numbers that are not finite, which"
            " JSON cannot have"
        )
    data = [
        {
            "object": "embedding",
            "index": index,
            "embedding": base64.b64encode(vector.tobytes()).decode()
            if as_text
            else vector.tolist(),
        }
        for index, vector in enumerate(vectors)
    ]
    tokens = sum(_prompt_tokens(contract, response) for response in responses)
    usage: dict[str, Any] = {"prompt_tokens": tokens, "total_tokens": tokens}
    return json.dump({"object": "list", "data": data, "model": name, "usage": usage})


def read_vectors(model: str, tensor: Tensor) -> Vectors:
    """Returns an output as FP32 rows, shape [N, D]; the last dimension is the vector."""
    data = copy_from_shared_memory(tensor).data
    assert isinstance(data, (bytes, memoryview))
    if tensor.datatype == "BF16":
        wide = np.frombuffer(data, "<u2").astype("<u4") << 16
        values = wide.view("<f4")
    elif tensor.datatype == "FP32":
        values = np.frombuffer(data, "<f4")
    elif tensor.datatype in _DTYPES:
        with np.errstate(over="ignore"):
            values = np.frombuffer(data, _DTYPES[tensor.datatype]).astype("<f4")
    else:
        raise model_failure(f"output '{tensor.name}' of model '{model}' has no floating point")
    width = tensor.shape[-1] if tensor.shape else 1
    if not width:
        raise model_failure(f"output '{tensor.name}' of model '{model}' has vectors of length 0")
    return values.reshape(-1, width)


def _read_json_vectors(model: str, tensor: Tensor) -> list[Vectors]:
    """Returns the vectors of an output whose elements are JSON arrays of numbers."""
    texts = read_texts(tensor)
    try:
        return [np.array(json.parse(text), "<f4").reshape(-1) for text in texts]
    except (HostError, TypeError, ValueError):
        raise model_failure(
            f"model '{model}' gave output '{tensor.name}' that is no JSON array of numbers"
        ) from None


def output_size(response: InferResponse) -> int:
    """Returns the bytes of the outputs of a response."""
    return sum(math.prod(tensor.shape) * 8 for tensor in response.outputs)


def _prompt_tokens(contract: Contract, response: InferResponse) -> int:
    for tensor in response.outputs:
        if contract.outputs.get(tensor.name) == "num_input_tokens":
            return read_number(tensor) or 0
    for name in _COUNTS:
        count = response.parameters.get(name)
        if isinstance(count, int):
            return count
    return 0


def _answer(
    contract: Contract, fields: Fields, name: str, response: InferResponse, request_id: bytes
) -> tuple[bytes, Sequence[bytes]]:
    """Returns head and body of the answer to a response. Raises nothing."""
    try:
        body = write_answer(contract, fields, 1, name, (response,))
    except HostError as error:
        return _error_answer(error, request_id)
    except Exception as error:  # a defect of ours; the client must get an answer
        _log.error("unexpected failure of an OpenAI request", exc_info=error)
        return _error_answer(unexpected_failure(error), request_id)
    return _HEAD % (STATUS_LINES[200], JSON, len(body), request_id), (body,)


def _error_answer(error: HostError, request_id: bytes) -> tuple[bytes, Sequence[bytes]]:
    found = from_host_error(error)
    body = found.body()
    head = _HEAD % (STATUS_LINES[found.status], JSON, len(body), request_id)
    return head + b"".join(b"%b: %b\r\n" % header for header in found.headers), (body,)
