"""Reads the responses of a model that gives JSON: deltas, or objects of OpenAI."""

from __future__ import annotations

from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.errors import OpenAIError, model_failure
from host.frontends.openai.outputs import (
    STOP,
    Delta,
    check_decoupled,
    finish_reason,
    parse_json,
    raise_error,
    read_texts,
)
from host.inference.request import InferResponse

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
