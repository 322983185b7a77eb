"""Tool calls: which of them a request allows or demands, and those in the text of a model.

Each parser reads every character once. The text of a call is held back until the call is complete.
The forms are those of Hermes and Qwen, of Llama 3.1 and later, and of Mistral.
"""

from __future__ import annotations

import json
import re
import uuid
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

from host.frontends.openai.contract import Contract
from host.frontends.openai.fields import Fields
from host.frontends.openai.outputs import JsonObjectEnd, possible_start


def wanted_tools(fields: Fields) -> list[dict[str, Any]] | None:
    """Returns the tools that the answer may call; None if it may call none."""
    return fields.get("tools") if fields.get("tool_choice") != "none" else None


def demanded_functions(contract: Contract, fields: Fields) -> list[dict[str, Any]]:
    """Returns the functions that the answer must choose from, as a schema says to the model.

    Returns none if the model takes tools itself, or cannot follow a schema.
    """
    follows_schema = contract.takes("sampling") or contract.takes("schema")
    if contract.takes("tools") or not follows_schema:
        return []
    return required_functions(fields)


def required_functions(fields: Fields) -> list[dict[str, Any]]:
    """Returns the functions that the answer must choose from; none if it may be a text."""
    functions = [tool["function"] for tool in wanted_tools(fields) or ()]
    choice = fields.get("tool_choice")
    if isinstance(choice, dict):
        name = choice["function"]["name"]
        return [function for function in functions if function["name"] == name][:1]
    return functions if choice == "required" else []


def wanted_schema(fields: Fields) -> Any:
    """Returns the JSON schema of `response_format`; None if it has none."""
    form = fields.get("response_format", {})
    return form["json_schema"].get("schema") if form.get("type") == "json_schema" else None


def demanded_schema(contract: Contract, fields: Fields) -> Any:
    """Returns the JSON schema that the text of the answer must follow; None if there is none."""
    functions = demanded_functions(contract, fields)
    if not functions:
        return wanted_schema(fields)
    if len(functions) == 1:
        return _parameters(functions[0])
    calls = [
        {
            "type": "object",
            "properties": {"name": {"const": one["name"]}, "parameters": _parameters(one)},
            "required": ["name", "parameters"],
            "additionalProperties": False,
        }
        for one in functions
    ]
    return {"anyOf": calls}


def _parameters(function: dict[str, Any]) -> Any:
    return function.get("parameters") or {"type": "object"}


Message = dict[str, Any]
"""Members of OpenAI's delta object: `content`, `tool_calls`."""


class ToolParser(ABC):
    """Converts the pieces of a text to members of a message. `found`: the text has a call."""

    found = False

    @abstractmethod
    def feed(self, piece: str) -> Message:
        """Returns what the next piece of the text adds."""

    def finish(self) -> Message:
        """Returns what the end of the text adds: what looked like the start of a call."""
        return {}


class ForcedCall(ToolParser):
    """The whole text is the arguments of one function, which the request demands."""

    def __init__(self, name: str) -> None:
        self._name = name

    def feed(self, piece: str) -> Message:
        """Returns the next part of the arguments."""
        if not piece:
            return {}
        if self.found:
            return {"tool_calls": [{"index": 0, "function": {"arguments": piece}}]}
        self.found = True
        return {"tool_calls": [tool_call(0, self._name, piece)]}


class ForcedChoice(ToolParser):
    """The whole text is one call, `{"name": ..., "parameters": {...}}`, as a schema demands."""

    def __init__(self) -> None:
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


def make_parser(name: str) -> ToolParser:
    """Returns a new parser; `name` is a value of `OPENAI_TOOL_PARSER`."""
    parsers: dict[str, Callable[[], ToolParser]] = {
        "hermes": HermesParser,
        "llama3": LlamaParser,
        "mistral": MistralParser,
    }
    return parsers[name]()


class _MarkedParser(ToolParser):
    """Base of the parsers: looks for a marker, and holds back what follows it until it is read.

    `_text` is what was not read yet; `_read_marked` reads what follows a marker.
    """

    _marker = ""

    def __init__(self) -> None:
        self._text = ""
        self._count = 0
        self._marked = False  # the marker was read
        self._after_call = False  # nothing but white space follows the last call so far
        self._object = JsonObjectEnd()
        self._pieces: list[str] = []  # of a text with an object that is not complete
        self._object_end = 0  # the place after this object, once it is complete
        self._contents: list[str] = []
        self._calls: list[Message] = []

    def feed(self, piece: str) -> Message:
        """Returns what the next piece of the text adds."""
        if self._pieces:
            end = self._object.find(piece)
            self._pieces.append(piece)
            if not end:
                return {}
            self._join_pieces()
            self._object_end = len(self._text) - len(piece) + end
        else:
            self._text += piece
        while self._read_marked() if self._marked else self._read_content():
            pass
        return self._message()

    def finish(self) -> Message:
        """Returns what was held back as content."""
        self._join_pieces()
        rest = (self._marker if self._marked else "") + self._text
        if not self._after_call or rest.strip() not in ("", self._marker):
            self._contents.append(rest)
        self._text = ""
        self._marked = False
        return self._message()

    def _message(self) -> Message:
        message: Message = {}
        content = "".join(self._contents)
        if content:
            message["content"] = content
        if self._calls:
            message["tool_calls"] = self._calls
        self._contents, self._calls = [], []
        return message

    def _read_content(self) -> bool:
        """Passes on the text before the next marker; returns whether the marker was read."""
        text = self._text
        if self._after_call:  # white space between calls is no content
            text = text.lstrip()
            self._after_call = not text or self._marker.startswith(text[: len(self._marker)])
        at = text.find(self._marker)
        if at < 0:
            keep = possible_start(text, (self._marker,))
            self._contents.append(text[: len(text) - keep])
            self._text = text[len(text) - keep :]
            return False
        self._contents.append(text[:at])
        self._text = text[at + len(self._marker) :]
        self._marked = True
        return True

    @abstractmethod
    def _read_marked(self) -> bool:
        """Reads a part of what follows the marker; returns whether something was read."""

    def _read_object(self, start: int) -> int:
        """Reads a call, which is a JSON object that begins at `start`.

        Returns the place after it; 0 if it is not complete, -1 if it is no call.
        """
        end = self._find_end(start)
        if not end:
            return 0
        return end if self._add_call(self._text[start:end]) else -1

    def _find_end(self, start: int) -> int:
        """Returns the place after the object that begins at `start`; 0 if it is not complete."""
        end = self._object_end or self._object.find(self._text, start)
        if end:
            self._object, self._object_end = JsonObjectEnd(), 0
        else:
            self._pieces.append(self._text)
        return end

    def _join_pieces(self) -> None:
        if self._pieces:
            self._text = "".join(self._pieces)
            self._pieces.clear()

    def _add_call(self, text: str) -> bool:
        """Adds a call from its JSON text; returns whether it is one."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return False
        if not isinstance(call.get("name"), str):
            return False
        arguments = call.get("arguments", call.get("parameters", {}))
        self._add(call["name"], arguments)
        return True

    def _add(self, name: str, arguments: Any) -> None:
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments, ensure_ascii=False)
        self._calls.append(tool_call(self._count, name, arguments))
        self._count += 1
        self.found = self._after_call = True

    def _give_up(self) -> bool:
        """Passes on the marker as content: no call follows it."""
        self._contents.append(self._marker)
        self._marked = False
        return True


class HermesParser(_MarkedParser):
    """Calls are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""

    _marker = "<tool_call>"
    _end_marker = "</tool_call>"

    def __init__(self) -> None:
        super().__init__()
        self._after_object = False

    def _read_marked(self) -> bool:
        text = self._text
        start = len(text) - len(text.lstrip())
        if self._after_object:
            rest = text[start:]
            if self._end_marker.startswith(rest[: len(self._end_marker)]):
                if len(rest) < len(self._end_marker):
                    return False
                rest = rest[len(self._end_marker) :]
            self._text = rest
            self._after_object = self._marked = False
            return True
        if start == len(text):
            return False
        if text[start] != "{":
            return self._give_up()
        end = self._read_object(start)
        if end == 0:
            return False
        if end < 0:
            return self._give_up()
        self._text = text[end:]
        self._after_object = True
        return True

    def finish(self) -> Message:
        """Returns what was held back as content; a missing end marker is no content."""
        if self._after_object:
            self._after_object = self._marked = False
            self._text = ""
        return super().finish()


class LlamaParser(_MarkedParser):
    """The text begins with a call `{"name": ..., "parameters": {...}}`; `;` separates calls.

    `<|python_tag|>` may stand in front.
    """

    _marker = "<|python_tag|>"

    def __init__(self) -> None:
        super().__init__()
        self._at_start = True

    def _read_content(self) -> bool:
        if not self._at_start:
            self._contents.append(self._text)
            self._text = ""
            return False
        text = self._text.lstrip()
        if text.startswith(self._marker):
            self._text = text[len(self._marker) :]
        elif not text or self._marker.startswith(text):
            return False
        if self._text.lstrip().startswith("{"):
            self._marked = True
            return True
        if not self._text.strip():
            return False
        self._at_start = False
        return True

    def _read_marked(self) -> bool:
        text = self._text
        start = len(text) - len(text.lstrip(" \t\r\n;" if self.found else None))
        if start == len(text):
            return False
        end = self._read_object(start) if text[start] == "{" else -1
        if end == 0:
            return False
        if end < 0:
            self._marked = self._at_start = False
        else:
            self._text = text[end:]
        return True

    def finish(self) -> Message:
        """Returns what was held back as content."""
        self._join_pieces()
        self._marked = False
        if self.found and not self._text.strip("; \n\t\r"):
            self._text = ""
        return super().finish()


class MistralParser(_MarkedParser):
    """Calls are `[TOOL_CALLS][{"name": ..., "arguments": {...}}, ...]`, or `[TOOL_CALLS]name{...}`.

    `[ARGS]` may stand between a name and its arguments.
    """

    _marker = "[TOOL_CALLS]"
    _name = re.compile(r"\s*([a-zA-Z0-9_.-]+)(?:\[CALL_ID\][^\[{]*)?(?:\[ARGS\])?\s*(?=\{)")
    _name_start = re.compile(r"\s*[a-zA-Z0-9_.-]*(?:\[[A-Z_\]a-z0-9]*){0,2}\s*")

    def __init__(self) -> None:
        super().__init__()
        self._in_array = False

    def _read_marked(self) -> bool:
        text = self._text
        start = len(text) - len(text.lstrip())
        if start == len(text):
            return False
        if self._in_array:
            return self._read_element(start)
        if text[start] == "[":
            self._in_array = True
            self._text = text[start + 1 :]
            return True
        named = self._name.match(text)
        if named is None:
            return False if self._name_start.fullmatch(text) else self._give_up()
        end = self._find_end(named.end())
        if not end:
            return False
        try:
            arguments = json.loads(text[named.end() : end])
        except (ValueError, RecursionError):
            return self._give_up()
        self._add(named[1], arguments)
        self._text = text[end:]
        self._marked = False
        return True

    def _read_element(self, start: int) -> bool:
        text = self._text
        if text[start] == "]":
            self._in_array = self._marked = False
            self._text = text[start + 1 :]
            return True
        if text[start] == ",":
            self._text = text[start + 1 :]
            return True
        end = self._read_object(start) if text[start] == "{" else -1
        if end == 0:
            return False
        if end < 0:
            self._in_array = False
            self._text = "[" + text
            return self._give_up()
        self._text = text[end:]
        return True
