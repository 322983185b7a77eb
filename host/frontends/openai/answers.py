"""The JSON objects and chunks that clients get for the choices of chats and completions."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterable, Sequence
from typing import Any

from host.frontends.http import json_text as json
from host.frontends.openai.errors import OpenAIError
from host.frontends.openai.fields import CHAT
from host.frontends.openai.logprobs import join_logprobs
from host.frontends.openai.outputs import Delta, usage_object

DONE = b"data: [DONE]\n\n"

_PREFIXES = {CHAT: "chatcmpl-"}


class Answer:
    """Writes one answer: a whole object, or the chunks of a stream, which have the same id."""

    def __init__(self, route: str, model: str, include_usage: bool = False) -> None:
        self.id = f"{_PREFIXES.get(route, 'cmpl-')}{uuid.uuid4().hex}"
        self._is_chat = route == CHAT
        self._model = model
        self.streams_usage = include_usage
        self._created = int(time.time())
        self._started: set[int] = set()  # choices whose role was sent

    def whole(self, deltas: Iterable[Delta], usage: dict[str, Any] | None) -> bytes:
        """Writes the complete answer."""
        choices: dict[int, _Choice] = {}
        for delta in deltas:
            choices.setdefault(delta.index, _Choice()).add(delta)
        written = [
            choice.chat(index) if self._is_chat else choice.completion(index)
            for index, choice in sorted(choices.items())
        ]
        kind = "chat.completion" if self._is_chat else "text_completion"
        return json.dump({**self._head(kind), "choices": written, "usage": usage})

    def chunks(self, delta: Delta) -> bytes:
        """Writes the events of one delta: the role of a choice first, its finish reason last."""
        events: list[bytes] = []
        if self._is_chat:
            if delta.index not in self._started:
                self._started.add(delta.index)
                events.append(self._chunk(delta.index, {"role": "assistant", "content": ""}))
            if delta.message or delta.logprobs:
                events.append(self._chunk(delta.index, delta.message, delta.logprobs))
            if delta.finish_reason is not None:
                events.append(self._chunk(delta.index, {}, None, delta.finish_reason))
        else:
            text = delta.message.get("content", "")
            if text or delta.logprobs:
                events.append(self._chunk(delta.index, text, delta.logprobs))
            if delta.finish_reason is not None:
                events.append(self._chunk(delta.index, "", None, delta.finish_reason))
        return b"".join(events)

    def end(self, usage: dict[str, Any] | None) -> bytes:
        """Writes the end of a stream: the usage if it is wanted and known, and `[DONE]`."""
        if not self.streams_usage or usage is None:
            return DONE
        return event({**self._chunk_head(), "choices": [], "usage": usage}) + DONE

    def failure(self, error: OpenAIError) -> bytes:
        """Writes the end of a stream that has failed."""
        return b"data: %b\n\n" % error.body()

    def _chunk(
        self, index: int, content: Any, logprobs: Any = None, finish_reason: str | None = None
    ) -> bytes:
        name = "delta" if self._is_chat else "text"
        if not self._is_chat:
            finish_reason = _completion_reason(finish_reason)
        choice = {
            "index": index,
            name: content,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }
        chunk = {**self._chunk_head(), "choices": [choice]}
        if self.streams_usage:
            chunk["usage"] = None
        return event(chunk)

    def _chunk_head(self) -> dict[str, Any]:
        return self._head("chat.completion.chunk" if self._is_chat else "text_completion")

    def _head(self, kind: str) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": None,
        }


class _Choice:
    """Joins the deltas of one choice."""

    def __init__(self) -> None:
        self._texts: dict[str, list[str]] = {}
        self._calls: dict[Any, dict[str, Any]] = {}
        self._arguments: dict[Any, list[str]] = {}
        self._logprobs: Any = None
        self._reason: str | None = None

    def add(self, delta: Delta) -> None:
        """Adds a delta."""
        for name, value in delta.message.items():
            if name == "tool_calls":
                for call in value:
                    self._add_call(call)
            else:
                self._texts.setdefault(name, []).append(value)
        if delta.logprobs is not None:
            self._logprobs = join_logprobs(self._logprobs, delta.logprobs)
        if delta.finish_reason is not None:
            self._reason = delta.finish_reason

    def _add_call(self, call: dict[str, Any]) -> None:
        index = str(call["index"])
        known = self._calls.setdefault(index, {"id": "", "type": "function", "function": {}})
        function = call.get("function")
        function = function if isinstance(function, dict) else {}
        known["id"] = known["id"] or call.get("id", "")
        known["function"].setdefault("name", function.get("name", ""))
        self._arguments.setdefault(index, []).append(str(function.get("arguments") or ""))

    def chat(self, index: int) -> dict[str, Any]:
        """Returns the choice of a chat completion."""
        message: dict[str, Any] = {"role": "assistant", "content": self._text("content")}
        message["refusal"] = self._text("refusal") or None
        if "reasoning_content" in self._texts:
            message["reasoning_content"] = self._text("reasoning_content")
        if self._calls:
            message["content"] = message["content"] or None
            for at, call in self._calls.items():
                call["function"]["arguments"] = "".join(self._arguments[at])
            message["tool_calls"] = list(self._calls.values())
        return {
            "index": index,
            "message": message,
            "logprobs": self._logprobs,
            "finish_reason": self._reason,
        }

    def completion(self, index: int) -> dict[str, Any]:
        """Returns the choice of a completion."""
        return {
            "index": index,
            "text": self._text("content"),
            "logprobs": self._logprobs,
            "finish_reason": _completion_reason(self._reason),
        }

    def _text(self, name: str) -> str:
        return "".join(self._texts.get(name, ()))


def event(value: Any) -> bytes:
    """Writes a server-sent event."""
    return b"data: %b\n\n" % json.dump(value)


def sum_usage(usages: Sequence[dict[str, Any] | None], per_prompt: int) -> dict[str, Any] | None:
    """Returns the usage of several calls; `per_prompt` calls in a row have the same prompt."""
    counted = [usage for usage in usages if usage is not None]
    if not counted:
        return None
    if len(usages) == 1:
        return counted[0]
    prompts = [_count(usage, "prompt_tokens") for usage in usages[::per_prompt]]
    completions = [_count(usage, "completion_tokens") for usage in usages]
    return usage_object(sum(prompts), sum(completions))


def _count(usage: dict[str, Any] | None, name: str) -> int:
    """Returns a count of a usage object, which the model may have made."""
    count = 0 if usage is None else usage.get(name)
    return count if isinstance(count, int) else 0


def _completion_reason(reason: str | None) -> str | None:
    return "stop" if reason == "tool_calls" else reason
