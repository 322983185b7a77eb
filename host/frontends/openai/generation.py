"""Answers chats, completions and responses: one call per choice, whole or as events."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from host.core import Core
from host.errors import HostError
from host.frontends.http.http_exchange import JSON, HttpExchange, trace_response
from host.frontends.http.inference_header import MAX_INLINE_BYTES
from host.frontends.http.routes import Route
from host.frontends.http1.asgi import Header
from host.frontends.openai.answers import Answer, ResponseAnswer, sum_usage
from host.frontends.openai.bodies import BodyReader, set_request_id
from host.frontends.openai.contract import Contract
from host.frontends.openai.field_support import prepare_fields
from host.frontends.openai.fields import CHAT, MAX_CHOICES, Fields, check_fields, too_deep
from host.frontends.openai.inference_handler import Handler
from host.frontends.openai.inputs import build_request, choice_fields
from host.frontends.openai.model_directory import ModelDirectory
from host.frontends.openai.model_files import OpenAIFiles, TokenCounter
from host.frontends.openai.openai_errors import from_host_error, invalid_value
from host.frontends.openai.outputs import Delta, LogprobsWriter, usage_object, wants_logprobs
from host.frontends.openai.response_fields import RESPONSES, chat_fields
from host.frontends.openai.response_readers import JsonReader, ResponseReader, TextReader
from host.frontends.openai.template import PromptRenderer
from host.frontends.openai.tool_calls import (
    ForcedCall,
    ForcedChoice,
    ToolParser,
    demanded_functions,
    make_parser,
    required_functions,
    wanted_tools,
)
from host.frontends.request_headers import HeaderForwarding
from host.inference.request import InferRequest
from host.metrics.latency import TokenTimer

_COMMENT = b": \n\n"


class KeepAlive:
    """Sends a comment, which clients ignore, after each `seconds` without a chunk.

    Close it before the last chunk: no comment may follow that.
    """

    def __init__(self, exchange: HttpExchange, seconds: float = 15.0) -> None:
        self._exchange = exchange
        self._seconds = seconds
        self._loop = asyncio.get_running_loop()
        self._last_sent = self._loop.time()
        self._task: asyncio.Task[None] | None = None
        self._timer = self._loop.call_later(seconds, self._send_if_silent)

    def chunk_sent(self) -> None:
        """Notes that the stream is not silent."""
        self._last_sent = self._loop.time()

    def close(self) -> None:
        """Sends no more comments."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()

    def _send_if_silent(self) -> None:
        left = self._last_sent + self._seconds - self._loop.time()
        if left <= 0:
            left = self._seconds
            if self._task is None or self._task.done():  # otherwise the client does not read
                self._task = self._loop.create_task(self._exchange.send_chunk(_COMMENT))
                self.chunk_sent()
        self._timer = self._loop.call_later(left, self._send_if_silent)


_MAX_INLINE_CHARACTERS = 2048
"""Characters that are counted in the event loop; this takes about a millisecond."""


class UsageCounter:
    """Counts the prompts and the texts of one request by the tokenizer of its model.

    `rendered`: a chat template made the prompt, with its special tokens. `texts` has the pieces of
    each call; calls of one prompt follow each other.
    """

    def __init__(
        self,
        counter: TokenCounter,
        prompts: Sequence[str | list[int] | None],
        rendered: bool,
        calls: int,
    ) -> None:
        self.texts: list[list[str]] = [[] for _ in range(calls)]
        self._counter = counter
        self._prompts = prompts
        self._rendered = rendered

    async def count(self, free_threads: asyncio.Semaphore) -> dict[str, Any] | None:
        """Returns the usage; None if a text is too long. Counts long texts in a thread."""
        prompts = sum(len(prompt) for prompt in self._prompts if prompt is not None)
        if prompts + sum(len(piece) for text in self.texts for piece in text) <= (
            _MAX_INLINE_CHARACTERS
        ):
            return self._count()
        async with free_threads:
            return await asyncio.to_thread(self._count)

    def _count(self) -> dict[str, Any] | None:
        prompt = [
            len(prompt)
            if isinstance(prompt, list)
            else self._counter.count(prompt or "", special_tokens=not self._rendered)
            for prompt in self._prompts
        ]
        texts = [self._counter.count("".join(text), special_tokens=False) for text in self.texts]
        counts = [count for count in prompt + texts if count is not None]
        if len(counts) < len(prompt) + len(texts):
            return None
        return usage_object(sum(counts[: len(prompt)]), sum(counts[len(prompt) :]))


_STREAM_HEADERS: tuple[Header, ...] = (
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)
_MAX_COUNTING_THREADS = 2
_EVENT_STREAM = b"text/event-stream; charset=utf-8"


@dataclass(slots=True)
class _Generation:
    """The calls of one request: each has its reader. `echoes`: the text before each choice.

    `usage` counts the tokens of a model that counts none. `timer` records the times of a stream.
    """

    requests: list[InferRequest]
    readers: list[ResponseReader]
    echoes: list[str]
    per_prompt: int
    without_model: bool = False  # only echoes are wanted
    usage: UsageCounter | None = None
    timer: TokenTimer | None = None


class GenerationHandler(Handler):
    """Answers `POST /v1/chat/completions`, `/v1/completions` and `/v1/responses`."""

    def __init__(
        self,
        core: Core,
        models: ModelDirectory,
        bodies: BodyReader,
        forwarding: HeaderForwarding,
        prompts: PromptRenderer,
    ) -> None:
        super().__init__(core, models, bodies, forwarding)
        self._prompts = prompts
        self._counting = asyncio.Semaphore(_MAX_COUNTING_THREADS)

    async def answer(self, route: str, exchange: HttpExchange, path: Route) -> None:
        """Answers one request of `CHAT`, `COMPLETIONS` or `RESPONSES`.

        Raises HostError before the first event of a stream.
        """
        started = time.monotonic()
        size, sent, name = await self._bodies.read(exchange)
        large = size > MAX_INLINE_BYTES
        answer: Answer | ResponseAnswer | None = None
        if route == RESPONSES:
            as_chat = await _run(large, chat_fields, sent)
            answer = ResponseAnswer(name, sent)
            route, sent = CHAT, as_chat
        contract, version = await self._models.find_when_loaded(name, route, exchange.client)
        fields = await _run(large, check_fields, sent, route, contract.defaults)
        fields = prepare_fields(contract, fields, route)
        options = fields.get("stream_options", {})
        answer = answer or Answer(route, name, bool(options.get("include_usage")))
        request_id = set_request_id(exchange, answer.id)
        prompts: Sequence[str | list[int] | None]
        if route == CHAT:
            prompts = [None]
            if contract.takes("prompt") and not contract.takes_whole_request:
                prompts = [await self._prompts.render(contract, fields, version, large)]
        else:
            prompts = _prompts(fields["prompt"])
        self._check_sizes(contract, fields, prompts, size)
        streamed = bool(fields.get("stream"))
        files = self._core.extension(OpenAIFiles, contract.model, version)
        counter = (
            None if files is None or (streamed and not answer.streams_usage) else files.counter
        )
        generation = await _run(
            large, build_generation, contract, fields, route, prompts, version, request_id, counter
        )
        if streamed:
            latencies = self._core.token_latencies(contract.model, version)
            generation.timer = TokenTimer(latencies, started)
        deltas = self._deltas(generation)
        with self._trace(exchange, generation.requests):
            async with aclosing(deltas):
                if streamed:
                    await self._stream(exchange, answer, generation, deltas)
                else:
                    await self._send_whole(exchange, answer, generation, deltas)

    def _check_sizes(
        self, contract: Contract, fields: Fields, prompts: Sequence[Any], size: int
    ) -> None:
        """Refuses a request whose choices together would take too much memory."""
        if contract.takes_whole_request:
            return
        choices = fields.get("n", 1)
        if len(prompts) * choices > MAX_CHOICES:
            raise invalid_value(
                f"'n' and 'prompt' ask for {len(prompts) * choices} choices, at most"
                f" {MAX_CHOICES} are possible",
                "n",
            )
        prompt_size = sum(len(prompt) for prompt in prompts if prompt is not None)
        rest = max(size - prompt_size, 0)
        self._bodies.check_size((prompt_size + rest * len(prompts)) * choices)

    async def _send_whole(
        self,
        exchange: HttpExchange,
        answer: Answer | ResponseAnswer,
        generation: _Generation,
        deltas: AsyncIterator[list[Delta]],
    ) -> None:
        joined: list[Delta] = []
        async for some in deltas:
            joined += some
        usage = await self._usage(generation)
        with trace_response(generation.requests[0]):
            body = answer.whole(joined, usage)
            await exchange.send_response(JSON, (body,))

    async def _stream(
        self,
        exchange: HttpExchange,
        answer: Answer | ResponseAnswer,
        generation: _Generation,
        deltas: AsyncIterator[list[Delta]],
    ) -> None:
        """Sends the events. An error after the head is an event, and the stream has no `[DONE]`."""
        keep_alive: KeepAlive | None = None
        try:
            async for some in deltas:
                if keep_alive is None:
                    await exchange.start_response(_EVENT_STREAM, _STREAM_HEADERS)
                    keep_alive = KeepAlive(exchange)
                events = b"".join(map(answer.chunks, some))
                if events:
                    with trace_response(generation.requests[0]):
                        await exchange.send_chunk(events)
                    keep_alive.chunk_sent()
            end = answer.end(await self._usage(generation))
        except HostError as error:
            if keep_alive is None:
                raise
            end = answer.failure(from_host_error(error))
        finally:
            if keep_alive is not None:
                keep_alive.close()
        await exchange.send_chunk(end, more=False)

    async def _usage(self, generation: _Generation) -> dict[str, Any] | None:
        """Returns the usage that the model counted; if it counted none, that of its tokenizer."""
        usages = [reader.usage for reader in generation.readers]
        usage = sum_usage(usages, generation.per_prompt)
        if usage is None and generation.usage is not None:
            usage = await generation.usage.count(self._counting)
        return usage

    async def _deltas(self, generation: _Generation) -> AsyncGenerator[list[Delta], None]:
        """Yields the deltas of all choices as they arrive. Leaving early cancels the calls."""
        echoes = [
            Delta(index, {"content": text}) for index, text in enumerate(generation.echoes) if text
        ]
        if generation.without_model:
            yield echoes
            yield [Delta(index, {}, "length") for index in range(len(generation.readers))]
            return
        calls = [
            self._read_call(request, reader, generation.timer)
            for request, reader in zip(generation.requests, generation.readers, strict=True)
        ]
        responses = calls[0] if len(calls) == 1 else _merge(calls)
        async with aclosing(responses):
            async for deltas in responses:
                yield echoes + deltas
                echoes = []

    async def _read_call(
        self, request: InferRequest, reader: ResponseReader, timer: TokenTimer | None
    ) -> AsyncGenerator[list[Delta], None]:
        call = await self._core.infer_when_loaded(request)
        async with aclosing(call.iterate_batches()) as batches:
            async for responses in batches:
                deltas: list[Delta] = []
                try:
                    for response in responses:
                        some = reader.read(response)
                        if timer is not None:
                            for delta in some:
                                timer.record_token(delta.index)
                        deltas += some
                        if reader.stopped:
                            break
                except HostError:
                    if deltas:
                        yield deltas  # the responses before the error
                    raise
                yield deltas
                if reader.stopped:
                    break  # this cancels the call
        yield reader.finish()


def build_generation(
    contract: Contract,
    fields: Fields,
    route: str,
    prompts: Sequence[str | list[int] | None],
    version: int,
    request_id: str,
    counter: TokenCounter | None,
) -> _Generation:
    """Builds the requests of all choices, and the readers of their responses."""
    whole = contract.takes_whole_request
    choices = 1 if whole else fields.get("n", 1)
    prompts = [None] if whole else prompts
    try:
        requests = [
            build_request(contract, variant, route, prompt, version, request_id)
            for prompt in prompts
            for variant in choice_fields(contract, fields, choices)
        ]
    except RecursionError:
        raise too_deep() from None
    usage: UsageCounter | None = None
    if counter is not None and not whole:
        usage = UsageCounter(counter, prompts, route == CHAT, len(requests))
    readers: list[ResponseReader] = []
    for index in range(len(requests)):
        if contract.gives("response"):
            readers.append(JsonReader(contract, index, fields.get("n", 1) if whole else 1))
        else:
            readers.append(_text_reader(contract, fields, route, index, usage))
    echoes: list[str] = []
    if fields.get("echo") and not whole:
        for prompt in prompts:
            if not isinstance(prompt, str):
                raise invalid_value("'echo' needs a prompt that is text", "echo")
            echoes += [prompt] * choices
    return _Generation(
        requests,
        readers,
        echoes,
        choices,
        bool(echoes) and fields.get("max_tokens") == 0,
        usage,
    )


def _text_reader(
    contract: Contract, fields: Fields, route: str, index: int, usage: UsageCounter | None
) -> TextReader:
    carried = contract.takes("sampling") or contract.takes_whole_request
    limit = fields.get("max_tokens")
    return TextReader(
        contract,
        index,
        () if carried or contract.takes("stop") else fields.get("stop", ()),
        None if carried or contract.takes("max_tokens") else limit,
        limit,
        _tool_parser(contract, fields) if route == CHAT else None,
        [function["name"] for function in required_functions(fields)] if route == CHAT else (),
        _logprobs_writer(fields, route),
        None if usage is None else usage.texts[index],
    )


def _tool_parser(contract: Contract, fields: Fields) -> ToolParser | None:
    functions = demanded_functions(contract, fields)
    if functions:
        return ForcedCall(functions[0]["name"]) if len(functions) == 1 else ForcedChoice()
    if wanted_tools(fields) and contract.tool_parser:
        return make_parser(contract.tool_parser)
    return None


def _logprobs_writer(fields: Fields, route: str) -> LogprobsWriter | None:
    if not wants_logprobs(fields):
        return None
    if route == CHAT:
        return LogprobsWriter(True, fields.get("top_logprobs", 0))
    return LogprobsWriter(False, int(fields["logprobs"]))


def _prompts(value: Any) -> list[str | list[int] | None]:
    """Returns the prompts of a completion: texts, or arrays of token ids."""
    if isinstance(value, str) or type(value[0]) is int:
        return [value]
    return list(value)


async def _run(in_thread: bool, function: Any, *arguments: Any) -> Any:
    """Runs a function in a thread if it has much to do."""
    if in_thread:
        return await asyncio.to_thread(function, *arguments)
    return function(*arguments)


async def _merge(
    streams: Sequence[AsyncGenerator[list[Delta], None]],
) -> AsyncGenerator[list[Delta], None]:
    """Yields what several streams yield, as it arrives. An error of one ends all of them."""
    queue: asyncio.Queue[list[Delta] | Exception | None] = asyncio.Queue(1)

    async def forward(stream: AsyncGenerator[list[Delta], None]) -> None:
        last: Exception | None = None
        try:
            async with aclosing(stream):
                async for deltas in stream:
                    await queue.put(deltas)
        except Exception as error:  # raised again by the reader of the queue
            last = error
        await queue.put(last)

    tasks = [asyncio.create_task(forward(stream)) for stream in streams]
    try:
        open_streams = len(tasks)
        while open_streams:
            deltas = await queue.get()
            if isinstance(deltas, Exception):
                raise deltas
            if deltas is None:
                open_streams -= 1
            else:
                yield deltas
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
