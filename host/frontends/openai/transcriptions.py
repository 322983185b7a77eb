"""Answers `POST /v1/audio/transcriptions`: a sound in, its text out."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from typing import Any

from host.errors import HostError
from host.frontends.http import json_text as json
from host.frontends.http.http_exchange import JSON, HttpExchange, trace_response
from host.frontends.http.routes import Route
from host.frontends.openai.answers import event
from host.frontends.openai.bodies import set_request_id
from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import TRANSCRIPTIONS, Fields, check_fields, model_name
from host.frontends.openai.inference_handler import Handler
from host.frontends.openai.inputs import SCHEDULING_FIELDS, build_request
from host.frontends.openai.openai_errors import (
    OpenAIError,
    from_host_error,
    invalid_type,
    invalid_value,
    model_failure,
    unsupported_field,
)
from host.frontends.openai.outputs import read_float, read_texts, utf8_decoder
from host.inference.request import InferRequest, InferResponse

_TEXT = b"text/plain; charset=utf-8"
_EVENT_STREAM = b"text/event-stream; charset=utf-8"
_LISTS = ("timestamp_granularities", "include")
_NEED_SEGMENTS = ("verbose_json", "srt", "vtt")


class TranscriptionHandler(Handler):
    """Answers transcription requests. Raises OpenAIError or HostError."""

    async def answer(self, exchange: HttpExchange, route: Route) -> None:
        """Answers one request."""
        sent = _read_form(await self._bodies.read_form(exchange, "file"))
        name = model_name(sent)
        contract, version = await self._models.find_when_loaded(
            name, TRANSCRIPTIONS, exchange.client
        )
        fields = check_fields(sent, TRANSCRIPTIONS, contract.defaults)
        _check_support(contract, fields)
        request_id = set_request_id(exchange, f"trsc-{uuid.uuid4().hex}")
        prompt = fields.get("prompt")
        request = await asyncio.to_thread(
            build_request, contract, fields, TRANSCRIPTIONS, prompt, version, request_id
        )
        transcript = _Transcript(contract)
        pieces = self._pieces(request, transcript)
        with self._trace(exchange, [request]):
            async with aclosing(pieces):
                if fields.get("stream"):
                    await _stream(exchange, pieces)
                    return
                text = "".join([piece async for piece in pieces])
            body = transcript.write(fields, text)
            kind = _TEXT if fields.get("response_format") in ("text", "srt", "vtt") else JSON
            with trace_response(request):
                await exchange.send_response(kind, (body,))

    async def _pieces(
        self, request: InferRequest, transcript: _Transcript
    ) -> AsyncGenerator[str, None]:
        """Yields the text as it arrives. Leaving early cancels the call."""
        async with aclosing(self._responses(request)) as responses:
            async for response in responses:
                yield transcript.read(response)
        yield transcript.finish()


async def _stream(exchange: HttpExchange, pieces: AsyncGenerator[str, None]) -> None:
    """Sends the text as events. An error after the head is an event, and nothing follows it."""
    texts: list[str] = []
    headers = ((b"cache-control", b"no-cache"),)
    try:
        async for piece in pieces:
            if not exchange.response_started:
                await exchange.start_response(_EVENT_STREAM, headers)
            if piece:
                texts.append(piece)
                await exchange.send_chunk(event({"type": "transcript.text.delta", "delta": piece}))
        done = event({"type": "transcript.text.done", "text": "".join(texts)})
        await exchange.send_chunk(done, more=False)
    except HostError as error:
        if not exchange.response_started:
            raise
        await exchange.send_chunk(b"data: %b\n\n" % from_host_error(error).body(), more=False)


def _read_form(values: dict[str, list[str | bytes]]) -> Fields:
    """Returns the fields of a form with their JSON types. Raises OpenAIError."""
    fields: Fields = {}
    for name, found in values.items():
        plain = name.removesuffix("[]")
        if plain in _LISTS:
            fields.setdefault(plain, []).extend(found)
            continue
        if len(found) > 1:
            raise invalid_value(f"'{name[:80]}' must be sent once", name[:80])
        fields[name] = found[0]
    if "temperature" in fields:
        try:
            fields["temperature"] = float(fields["temperature"])
        except ValueError:
            raise invalid_type("temperature", "a number", "") from None
    for name in SCHEDULING_FIELDS:
        if fields.get(name, "").isdecimal() and len(fields[name]) <= 20:
            fields[name] = int(fields[name])
    if "stream" in fields:
        known = {"true": True, "false": False}
        if fields["stream"].lower() not in known:
            raise invalid_type("stream", "a boolean", "")
        fields["stream"] = known[fields["stream"].lower()]
    return fields


def _check_support(contract: Contract, fields: Fields) -> None:
    """Refuses what the model does not give. Raises OpenAIError."""
    form = fields.get("response_format", "json")
    if form in _NEED_SEGMENTS and not contract.gives("segments"):
        raise _not_given(contract, "response_format", form, "segments")
    granularities = fields.get("timestamp_granularities", ())
    if granularities and form != "verbose_json":
        raise invalid_value(
            "'timestamp_granularities' needs 'response_format': verbose_json",
            "timestamp_granularities",
        )
    if "word" in granularities and not contract.gives("words"):
        raise _not_given(contract, "timestamp_granularities", "word", "words")
    if "include" in fields:
        raise unsupported_field("'include' is not supported for transcriptions", "include")
    if fields.get("stream") and form not in ("json", "text"):
        raise invalid_value("'stream' needs 'response_format' json or text", "stream")


def _not_given(contract: Contract, field: str, value: str, output: str) -> OpenAIError:
    return unsupported_field(
        f"model '{contract.model}' does not take '{field}' {value}: it has no output '{output}'",
        field,
    )


class _Transcript:
    """Reads the responses of one call."""

    def __init__(self, contract: Contract) -> None:
        self._contract = contract
        self._decoder = utf8_decoder()
        self._lists: dict[str, list[Any]] = {"segments": [], "words": []}
        self._language: str | None = None
        self._duration: float | None = None

    def read(self, response: InferResponse) -> str:
        """Returns the text that a response adds. Raises OpenAIError."""
        text = ""
        for tensor in response.outputs:
            meaning = self._contract.outputs.get(tensor.name, "")
            if meaning == "duration":
                self._duration = read_float(tensor)
                continue
            if meaning not in ("text", "language", *self._lists):
                continue
            for value in read_texts(tensor):
                if meaning == "text":
                    text += self._decoder.decode(value)
                elif meaning == "language":
                    self._language = value.decode(errors="replace")
                elif value:
                    self._lists[meaning] += self._timed(tensor.name, value)
        return text

    def finish(self) -> str:
        """Returns the text that the end adds: a character that is not complete."""
        return self._decoder.decode(b"", True)

    def write(self, fields: Fields, text: str) -> bytes:
        """Writes the transcription in the format of the request."""
        segments = self._lists["segments"]
        match fields.get("response_format"):
            case "text":
                return f"{text}\n".encode()
            case "srt":
                return write_srt(segments).encode()
            case "vtt":
                return write_vtt(segments).encode()
            case "verbose_json":
                document: dict[str, Any] = {
                    "task": "transcribe",
                    "language": self._language,
                    "duration": self._duration,
                    "text": text,
                }
                wanted = fields.get("timestamp_granularities", ["segment"])
                if "segment" in wanted:
                    document["segments"] = [
                        {"id": index, **segment} for index, segment in enumerate(segments)
                    ]
                if "word" in wanted:
                    document["words"] = self._lists["words"]
                return json.dump(document)
        return json.dump({"text": text})

    def _timed(self, output: str, text: bytes) -> list[dict[str, Any]]:
        """Returns the texts with times of an output. Raises OpenAIError."""
        member = "word" if self._contract.outputs[output] == "words" else "text"
        try:
            entries = json.parse(text)
        except HostError:
            entries = None
        if not isinstance(entries, list) or not all(_is_timed(one, member) for one in entries):
            raise model_failure(
                f"model '{self._contract.model}' gave output '{output}' that is no JSON array of"
                f" objects with 'start', 'end' and '{member}':"
                f" {text[:80].decode(errors='replace')}"
            )
        return entries


def _is_timed(entry: Any, member: str) -> bool:
    return (
        isinstance(entry, dict)
        and isinstance(entry.get(member), str)
        and all(type(entry.get(name)) in (int, float) for name in ("start", "end"))
    )


Segments = Sequence[Mapping[str, Any]]
"""Objects with `start` and `end` in seconds, and `text`."""


def write_srt(segments: Segments) -> str:
    """Writes SubRip: numbered cues, with a comma before the milliseconds."""
    return "".join(
        f"{number}\n{_time(segment['start'], ',')} --> {_time(segment['end'], ',')}\n"
        f"{_text(segment)}\n\n"
        for number, segment in enumerate(segments, 1)
    )


def write_vtt(segments: Segments) -> str:
    """Writes WebVTT: a head, and cues with a point before the milliseconds."""
    cues = (
        f"{_time(segment['start'], '.')} --> {_time(segment['end'], '.')}\n{_text(segment)}\n\n"
        for segment in segments
    )
    return "WEBVTT\n\n" + "".join(cues)


def _time(seconds: float, point: str) -> str:
    milliseconds = max(0, round(seconds * 1000))
    minutes, rest = divmod(milliseconds, 60_000)
    hours, minutes = divmod(minutes, 60)
    return f"{hours:02}:{minutes:02}:{rest // 1000:02}{point}{rest % 1000:03}"


def _text(segment: Mapping[str, Any]) -> str:
    """Returns the text of a cue: an empty line, or an arrow, would end or break the cue."""
    lines = str(segment["text"]).replace("-->", "->").splitlines()
    return "\n".join(line for line in map(str.strip, lines) if line)
