"""Reads the responses of a model: those with texts, and those with JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.openai_errors import OpenAIError, model_failure
from host.frontends.openai.outputs import (
    STOP,
    Delta,
    LogprobsWriter,
    StopSearch,
    check_decoupled,
    finish_reason,
    parse_json,
    raise_error,
    read_number,
    read_texts,
    usage_object,
    utf8_decoder,
)
from host.frontends.openai.tool_calls import ToolParser
from host.inference.request import InferResponse, Tensor

_MEMBERS = ("role", "content", "reasoning_content", "refusal", "tool_calls")
"""The members of a delta that a model may give."""


class JsonReader:
    """Reads the responses of a model that gives JSON: deltas, or objects of OpenAI.

    The model makes `choices` choices itself; their indices begin at `first`.
    """

    def __init__(self, contract: Contract, first: int, choices: int) -> None:
        self.stopped = False
        self.usage: dict[str, Any] | None = None
        self._contract = contract
        self._first = first
        self._choices = choices
        self._reasons: dict[int, str | None] = {first: None}
        self._have_tool_calls: set[int] = set()
        self._has_response = False

    def read(self, response: InferResponse) -> list[Delta]:
        """Returns what a response adds. Raises OpenAIError."""
        raise_error(response)
        deltas: list[Delta] = []
        for tensor in response.outputs:
            if self._contract.outputs.get(tensor.name) != "response":
                continue
            self._has_response = True
            for text in read_texts(tensor):
                if text:
                    deltas += self._read_object(tensor.name, text)
        return deltas

    def finish(self) -> list[Delta]:
        """Returns the finish reason of each choice."""
        if not self._has_response:
            check_decoupled(self._contract, "response")
        return [
            Delta(index, {}, reason or self._default_reason(index))
            for index, reason in sorted(self._reasons.items())
        ]

    def _default_reason(self, index: int) -> str:
        return "tool_calls" if index in self._have_tool_calls else STOP

    def _read_object(self, output: str, text: bytes) -> list[Delta]:
        chunk = parse_json(text)
        if not isinstance(chunk, dict):
            raise self._failure(output, text, "no JSON object")
        if isinstance(chunk.get("error"), dict):
            raise model_failure(str(chunk["error"].get("message", "the model failed")))
        usage = chunk.get("usage")
        if isinstance(usage, dict):
            self.usage = usage
        choices = chunk.get("choices", [chunk])
        if not isinstance(choices, list):
            raise self._failure(output, text, "no chunk of choices")
        deltas = []
        for choice in choices:
            if not isinstance(choice, dict):
                raise self._failure(output, text, "no chunk of choices")
            deltas += self._read_choice(output, text, choice)
        return deltas

    def _read_choice(self, output: str, text: bytes, choice: dict[str, Any]) -> list[Delta]:
        index = choice.get("index", 0)
        if type(index) is not int or not 0 <= index < self._choices:
            raise self._failure(output, text, "no choice that was asked for")
        index += self._first
        source = choice.get("delta") or choice.get("message") or choice
        if not isinstance(source, dict):
            raise self._failure(output, text, "no delta")
        message = {
            name: source[name] for name in _MEMBERS if source.get(name) not in (None, "", [])
        }
        if "text" in choice and choice["text"]:
            message["content"] = choice["text"]
        message.pop("role", None)
        for name in ("content", "reasoning_content", "refusal"):
            if type(message.get(name, "")) is not str:
                raise self._failure(output, text, f"a '{name}' that is no text")
        calls = message.get("tool_calls", [])
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise self._failure(output, text, "'tool_calls' that is no array of objects")
        if calls:
            self._have_tool_calls.add(index)
            message["tool_calls"] = [{"index": at, **call} for at, call in enumerate(calls)]
        self._reasons.setdefault(index, None)
        reason = choice.get("finish_reason")
        if reason:
            self._reasons[index] = finish_reason(self._contract.model, str(reason))
        logprobs = choice.get("logprobs")
        return [Delta(index, message, None, logprobs)] if message or logprobs else []

    def _failure(self, output: str, text: bytes, complaint: str) -> OpenAIError:
        return model_failure(
            f"model '{self._contract.model}' gave output '{output}' that is {complaint}:"
            f" {text[:80].decode(errors='replace')}"
        )


class TextReader:
    """Reads the outputs of a model that gives texts, one choice per call.

    `stops`: stop sequences that the model does not search itself. `max_tokens`: cuts the text of a
    model that counts its tokens but does not take the limit; `limit` gives the finish reason.
    `tools` finds the tool calls in the text, which must call one of the functions `required`.
    `logprobs`: log probabilities are wanted. `texts` gets all texts of the model, if they are to be
    counted.
    """

    def __init__(
        self,
        contract: Contract,
        index: int,
        stops: Sequence[str],
        max_tokens: int | None,
        limit: int | None,
        tools: ToolParser | None,
        required: Sequence[str],
        logprobs: LogprobsWriter | None,
        texts: list[str] | None,
    ) -> None:
        self.stopped = False
        self._tools = tools
        self._required = required
        self._logprobs = logprobs
        self._texts = texts
        self._contract = contract
        self._index = index
        self._decoder = utf8_decoder()
        self._search = StopSearch(stops)
        self._max_tokens = max_tokens
        self._limit = limit
        self._reason: str | None = None
        self._has_tool_calls = False
        self._has_text = False
        self._prompt_tokens: int | None = None
        self._completion_tokens: int | None = None

    @property
    def usage(self) -> dict[str, Any] | None:
        """The token counts of the call; None if the model counts nothing."""
        if self._prompt_tokens is None and self._completion_tokens is None:
            return None
        return usage_object(self._prompt_tokens or 0, self._completion_tokens or 0)

    def read(self, response: InferResponse) -> list[Delta]:
        """Returns what a response adds. Raises OpenAIError."""
        raise_error(response)
        message: dict[str, Any] = {}
        reason: str | None = None
        logprobs: dict[str, Any] | None = None
        for tensor in response.outputs:
            match self._contract.outputs.get(tensor.name):
                case "text":
                    self._has_text = True
                    piece = self._search.feed(self._decoder.decode(self._single(tensor)))
                    self._add_text(message, piece)
                case "logprobs" if self._logprobs is not None:
                    logprobs = self._read_logprobs(self._logprobs, tensor)
                case "finish_reason":
                    reason = self._single(tensor).decode(errors="replace") or reason
                case "reasoning_content":
                    text = self._single(tensor).decode(errors="replace")
                    if text:
                        message["reasoning_content"] = text
                        if self._texts is not None:
                            self._texts.append(text)
                case "tool_calls":
                    calls = self._tool_calls(tensor)
                    if calls:
                        message["tool_calls"] = calls
                case "num_input_tokens":
                    self._count_prompt(read_number(tensor))
                case "num_output_tokens":
                    self._count_completion(read_number(tensor))
        given = response.parameters
        for name in ("prompt_tokens", "num_input_tokens"):
            self._count_prompt(given.get(name))
        for name in ("completion_tokens", "num_output_tokens"):
            self._count_completion(given.get(name))
        reason = reason or str(given.get("finish_reason") or "")
        if reason and reason != "None":
            self._reason = finish_reason(self._contract.model, reason)
        self._has_tool_calls |= "tool_calls" in message
        if self._search.found:
            self._reason, self.stopped = STOP, True
        elif self._max_tokens is not None and (self._completion_tokens or 0) >= self._max_tokens:
            self._reason, self.stopped = "length", True
        if not message and not logprobs:
            return []
        return [Delta(self._index, message, None, logprobs)]

    def _add_text(self, message: dict[str, Any], piece: str) -> None:
        if self._texts is not None:
            self._texts.append(piece)
        if self._tools is not None:
            message.update(self._tools.feed(piece))
            self._check_calls(message)
        elif piece:
            message["content"] = piece

    def _check_calls(self, message: dict[str, Any]) -> None:
        """Refuses calls of functions that are not among the required ones."""
        for call in message.get("tool_calls", ()) if self._required else ():
            name = call["function"].get("name", self._required[0])  # absent in later fragments
            if name not in self._required:
                raise model_failure(
                    f"model '{self._contract.model}' called '{name[:80]}', which is not among the"
                    " functions that the request requires"
                )

    def finish(self) -> list[Delta]:
        """Returns the held text and the finish reason."""
        if not (self._has_text or self._has_tool_calls):
            check_decoupled(self._contract, "text")
        message: dict[str, Any] = {}
        if not self._search.found:
            rest = self._search.feed(self._decoder.decode(b"", True)) + self._search.flush()
            self._add_text(message, rest)
        if self._tools is not None:
            self._has_tool_calls |= self._tools.found
            _join(message, self._tools.finish())
            self._check_calls(message)
            if self._required and not self._tools.found and self._reason != "length":
                raise model_failure(
                    f"model '{self._contract.model}' called none of the functions that the request"
                    " requires"
                )
        return [Delta(self._index, message, self._finish_reason())]

    def _finish_reason(self) -> str:
        if self._tools is not None and self._tools.found and self._reason in (None, STOP):
            return "tool_calls"
        if self._reason is not None:
            return self._reason
        if self._has_tool_calls:
            return "tool_calls"
        if self._limit is not None and (self._completion_tokens or 0) >= self._limit:
            return "length"
        return STOP

    def _count_prompt(self, count: object) -> None:
        if isinstance(count, int) and self._prompt_tokens is None:
            self._prompt_tokens = count

    def _count_completion(self, count: object) -> None:
        if isinstance(count, int):
            self._completion_tokens = (self._completion_tokens or 0) + count

    def _single(self, tensor: Tensor) -> bytes:
        """Returns the only element of an output; an empty output is an empty text."""
        values = read_texts(tensor)
        if len(values) > 1:
            raise model_failure(
                f"model '{self._contract.model}' gave {len(values)} elements of output"
                f" '{tensor.name}' in one response, expected 1"
            )
        return values[0] if values else b""

    def _read_logprobs(self, writer: LogprobsWriter, tensor: Tensor) -> dict[str, Any] | None:
        text = self._single(tensor)
        tokens = parse_json(text) if text else []
        try:
            if not isinstance(tokens, list):
                raise ValueError("no array")
            return writer.write(tokens)
        except ValueError:
            raise model_failure(
                f"model '{self._contract.model}' gave output '{tensor.name}' that is no JSON array"
                f" of tokens: {text[:80].decode(errors='replace')}"
            ) from None

    def _tool_calls(self, tensor: Tensor) -> list[Any]:
        text = self._single(tensor)
        calls = parse_json(text) if text else []
        if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
            raise model_failure(
                f"model '{self._contract.model}' gave output '{tensor.name}' that is no JSON array"
                f" of objects: {text[:80].decode(errors='replace')}"
            )
        return [{"index": index, **call} for index, call in enumerate(calls)]


def _join(message: dict[str, Any], rest: dict[str, Any]) -> None:
    """Appends the members of a delta to those of another one."""
    for name, value in rest.items():
        message[name] = message[name] + value if name in message else value


ResponseReader = JsonReader | TextReader
"""Reads the responses of one call.

`stopped`: no further response is wanted. `usage`: token counts, None if nothing was counted.
"""
