"""The JSON objects and the events that clients of chats, completions and responses get."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Any

from host.frontends.http import json_text as json
from host.frontends.openai.fields import CHAT, Fields
from host.frontends.openai.openai_errors import OpenAIError
from host.frontends.openai.outputs import Delta, join_logprobs, usage_object

DONE = b"data: [DONE]\n\n"

_PREFIXES = {CHAT: "chatcmpl-"}


class Answer:
    """Writes one answer: a whole object, or the chunks of a stream, which have the same id."""

    def __init__(self, route: str, model: str, include_usage: bool) -> None:
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


_Event = dict[str, Any]
_INCOMPLETE = {"length": "max_output_tokens", "content_filter": "content_filter"}
_TEXTS = {"content": "output_text", "refusal": "refusal", "reasoning_content": "reasoning_text"}
"""The types of the parts that members of a delta become."""


class ResponseAnswer:
    """Writes one response: a whole object, or the events of a stream.

    `sent`: the fields of the client, some of which are members of the response.
    """

    streams_usage = True

    def __init__(self, model: str, sent: Fields) -> None:
        self.id = f"resp_{uuid.uuid4().hex}"
        self._members = _request_members(model, sent)
        self._created = int(time.time())
        self._sequence_number = 0
        self._started = False
        self._items: list[_Item] = []
        self._text: _TextItem | None = None  # the item that gets texts
        self._logprobs: list[Any] = []  # of tokens whose text has not arrived yet
        self._calls: dict[str, _Item] = {}
        self._reason: str | None = None

    def whole(self, deltas: Iterable[Delta], usage: dict[str, Any] | None) -> bytes:
        """Writes the complete response."""
        for delta in deltas:
            self._add(delta)
        self._complete()
        return json.dump(self._response(self._status(), usage))

    def chunks(self, delta: Delta) -> bytes:
        """Writes the events of one delta."""
        return self._write(self._start() + self._add(delta))

    def end(self, usage: dict[str, Any] | None) -> bytes:
        """Writes the end of a stream."""
        events = self._start() + self._complete()
        status = self._status()
        events.append({"type": f"response.{status}", "response": self._response(status, usage)})
        return self._write(events)

    def failure(self, error: OpenAIError) -> bytes:
        """Writes the end of a stream that has failed."""
        code = "invalid_prompt" if error.status < 500 else "server_error"
        response = self._response("failed", None)
        response["error"] = {"code": code, "message": error.message}
        return self._write([*self._start(), {"type": "response.failed", "response": response}])

    def _start(self) -> list[_Event]:
        if self._started:
            return []
        self._started = True
        return [
            {"type": f"response.{name}", "response": self._response("in_progress", None)}
            for name in ("created", "in_progress")
        ]

    def _add(self, delta: Delta) -> list[_Event]:
        events: list[_Event] = []
        if isinstance(delta.logprobs, dict):
            content = delta.logprobs.get("content")
            self._logprobs += content if isinstance(content, list) else ()
        for member, kind in _TEXTS.items():
            text = delta.message.get(member)
            if text:
                item = self._text
                if item is None or item.part_type != kind:
                    events += self._close_text()
                    item = self._text = _TextItem(len(self._items), kind)
                    self._items.append(item)
                    events += item.open()
                logprobs: list[Any] = []
                if member == "content":
                    logprobs, self._logprobs = self._logprobs, []
                events.append(item.add(text, logprobs))
        for call in delta.message.get("tool_calls", ()):
            events += self._close_text() + self._add_call(call)
        self._reason = delta.finish_reason or self._reason
        return events

    def _add_call(self, fragment: dict[str, Any]) -> list[_Event]:
        function = fragment.get("function")
        function = function if isinstance(function, dict) else {}
        index = str(fragment["index"])
        events: list[_Event] = []
        item = self._calls.get(index)
        if item is None:
            name = str(function.get("name") or "")
            call_id = str(fragment.get("id") or f"call_{uuid.uuid4().hex}")
            item = self._calls[index] = _CallItem(len(self._items), name, call_id)
            self._items.append(item)
            events += item.open()
        arguments = str(function.get("arguments") or "")
        return [*events, item.add(arguments)] if arguments else events

    def _close_text(self) -> list[_Event]:
        item, self._text = self._text, None
        if item is not None and item.part_type == "output_text":
            item.logprobs += self._logprobs
            self._logprobs = []
        return [] if item is None else item.close("completed")

    def _complete(self) -> list[_Event]:
        """Closes the items that are still open."""
        status = self._status()
        open_items = [*self._calls.values(), *([self._text] if self._text else [])]
        if self._text is not None and self._text.part_type == "output_text":
            self._text.logprobs += self._logprobs
        return [event for item in open_items for event in item.close(status)]

    def _status(self) -> str:
        return "incomplete" if self._reason in _INCOMPLETE else "completed"

    def _response(self, status: str, usage: dict[str, Any] | None) -> dict[str, Any]:
        details = None
        if status == "incomplete":
            details = {"reason": _INCOMPLETE[self._reason or ""]}
        return {
            "id": self.id,
            "object": "response",
            "created_at": self._created,
            "status": status,
            "error": None,
            "incomplete_details": details,
            "output": [item.document() for item in self._items],
            "usage": None if usage is None else _usage(usage),
            **self._members,
        }

    def _write(self, events: list[_Event]) -> bytes:
        lines = []
        for event in events:
            event["sequence_number"] = self._sequence_number
            self._sequence_number += 1
            lines.append(b"event: %b\ndata: %b\n\n" % (event["type"].encode(), json.dump(event)))
        return b"".join(lines)


class _Item(ABC):
    """An item of the output, which grows by fragments of text."""

    part_type = ""

    def __init__(self, index: int, prefix: str) -> None:
        self.id = f"{prefix}_{uuid.uuid4().hex}"
        self.index = index
        self.status = "in_progress"
        self.fragments: list[str] = []

    @property
    def text(self) -> str:
        """All fragments."""
        return "".join(self.fragments)

    @abstractmethod
    def document(self) -> dict[str, Any]:
        """Returns the item as it is now."""

    def open(self) -> list[_Event]:
        """Returns the events of the beginning."""
        return [
            {
                "type": "response.output_item.added",
                "output_index": self.index,
                "item": self.document(),
            }
        ]

    @abstractmethod
    def add(self, fragment: str) -> _Event:
        """Adds a fragment, and returns its event."""

    def close(self, status: str) -> list[_Event]:
        """Returns the events of the end."""
        self.status = status
        return [
            {
                "type": "response.output_item.done",
                "output_index": self.index,
                "item": self.document(),
            }
        ]

    def event(self, kind: str, **members: Any) -> _Event:
        """Returns an event of the item."""
        place = {"item_id": self.id, "output_index": self.index}
        return {"type": f"response.{kind}", **place, **members}


class _TextItem(_Item):
    """A message, or the reasoning of the model: one part of text."""

    def __init__(self, index: int, part_type: str) -> None:
        self.part_type = part_type
        self.logprobs: list[Any] = []
        self._is_reasoning = part_type == "reasoning_text"
        super().__init__(index, "rs" if self._is_reasoning else "msg")

    def document(self) -> dict[str, Any]:
        content = [self._part()] if self.fragments else []
        if self._is_reasoning:
            kind: dict[str, Any] = {"type": "reasoning", "summary": []}
        else:
            kind = {"type": "message", "role": "assistant"}
        return {"id": self.id, **kind, "status": self.status, "content": content}

    def open(self) -> list[_Event]:
        added = self.event("content_part.added", content_index=0, part=self._part())
        return [*super().open(), added]

    def add(self, fragment: str, logprobs: Sequence[Any] = ()) -> _Event:
        self.fragments.append(fragment)
        self.logprobs += logprobs
        event = self.event(f"{self.part_type}.delta", content_index=0, delta=fragment)
        return self._with_logprobs(event, logprobs)

    def close(self, status: str) -> list[_Event]:
        member = "refusal" if self.part_type == "refusal" else "text"
        event = self.event(f"{self.part_type}.done", content_index=0, **{member: self.text})
        return [
            self._with_logprobs(event, self.logprobs),
            self.event("content_part.done", content_index=0, part=self._part()),
            *super().close(status),
        ]

    def _part(self) -> dict[str, Any]:
        if self.part_type == "refusal":
            return {"type": "refusal", "refusal": self.text}
        part: dict[str, Any] = {"type": self.part_type, "text": self.text}
        if not self._is_reasoning:
            part["annotations"] = []
        return self._with_logprobs(part, self.logprobs)

    def _with_logprobs(self, members: dict[str, Any], logprobs: Sequence[Any]) -> dict[str, Any]:
        """Adds the member that clients expect of output texts."""
        if self.part_type == "output_text":
            members["logprobs"] = list(logprobs)
        return members


class _CallItem(_Item):
    """A call of a function."""

    def __init__(self, index: int, name: str, call_id: str) -> None:
        super().__init__(index, "fc")
        self._name = name
        self._call_id = call_id

    def document(self) -> dict[str, Any]:
        return {
            "id": self.id,
            "type": "function_call",
            "status": self.status,
            "call_id": self._call_id,
            "name": self._name,
            "arguments": self.text,
        }

    def add(self, fragment: str) -> _Event:
        self.fragments.append(fragment)
        return self.event("function_call_arguments.delta", delta=fragment)

    def close(self, status: str) -> list[_Event]:
        done = self.event("function_call_arguments.done", name=self._name, arguments=self.text)
        return [done, *super().close(status)]


def _request_members(model: str, sent: Fields) -> dict[str, Any]:
    """Returns the members of a response that repeat the request."""
    text = sent.get("text") or {}
    return {
        "model": model,
        "instructions": sent.get("instructions"),
        "max_output_tokens": sent.get("max_output_tokens"),
        "metadata": sent.get("metadata", {}),
        "parallel_tool_calls": sent.get("parallel_tool_calls", True),
        "previous_response_id": None,
        "reasoning": sent.get("reasoning", {"effort": None, "summary": None}),
        "store": False,
        "temperature": sent.get("temperature"),
        "text": {"format": {"type": "text"}, **text},
        "tool_choice": sent.get("tool_choice", "auto"),
        "tools": sent.get("tools", []),
        "top_p": sent.get("top_p"),
        "truncation": sent.get("truncation", "disabled"),
        "user": sent.get("user"),
    }


def _usage(usage: dict[str, Any]) -> dict[str, Any]:
    """Converts the usage of a chat."""
    return {
        "input_tokens": usage.get("prompt_tokens", 0),
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": usage.get("completion_tokens", 0),
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.get("total_tokens", 0),
    }
