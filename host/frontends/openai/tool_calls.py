"""Tool calls in the text of a model: as members of a message, and those that a request demands."""

from __future__ import annotations

import json
import uuid
from typing import Any, Protocol

Message = dict[str, Any]
"""Members of OpenAI's delta object: `content`, `tool_calls`."""


class ToolParser(Protocol):
    """Converts the pieces of a text to members of a message."""

    @property
    def found(self) -> bool:
        """Whether the text has a call."""

    def feed(self, piece: str) -> Message:
        """Returns what the next piece of the text adds."""

    def finish(self) -> Message:
        """Returns what the end of the text adds: what looked like the start of a call."""


class ForcedCall:
    """The whole text is the arguments of one function, which the request demands."""

    def __init__(self, name: str) -> None:
        self.found = False
        self._name = name

    def feed(self, piece: str) -> Message:
        """Returns the next part of the arguments."""
        if not piece:
            return {}
        if self.found:
            return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        self.found = True
        return {"tool_calls": [tool_call(0, self._name, piece)]}

    def finish(self) -> Message:
        """Returns nothing: no text is held back."""
        return {}


class ForcedChoice:
    """The whole text is one call, `{"name": ..., "parameters": {...}}`, as a schema demands."""

    def __init__(self) -> None:
        self.found = False
        self._pieces: list[str] = []

    def feed(self, piece: str) -> Message:
        """Holds the piece back."""
        self._pieces.append(piece)
        return {}

    def finish(self) -> Message:
        """Returns the call; the text if there is no call."""
        text = "".join(self._pieces)
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            call = None
        if not (
            isinstance(call, dict)
            and isinstance(call.get("name"), str)
            and isinstance(call.get("parameters"), dict)
        ):
            return {"content": text} if text else {}
        self.found = True
        arguments = json.dumps(call["parameters"], ensure_ascii=False)
        return {"tool_calls": [tool_call(0, call["name"], arguments)]}


def tool_call(index: int, name: str, arguments: str) -> Message:
    """Returns a call with a new id, as a member of `tool_calls`; `arguments` is JSON text."""
    return {
        "index": index,
        "id": f"call_{uuid.uuid4().hex[:24]}",
        "type": "function",
        "function": {"name": name, "arguments": arguments},
    }
