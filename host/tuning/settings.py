"""The settings of a model that are tuned, in its configuration and in the text of it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from host.config.pbtxt import parse_pbtxt, parse_pbtxt_with_source
from host.errors import unsupported

_COMMENT_OR_STRING = re.compile(r"""#[^\n]*|"(?:\\.|[^"\\\n])*"|'(?:\\.|[^'\\\n])*'""")
_SPACE = re.compile(r"(?:\s|#[^\n]*)*")
_SCALAR = re.compile(r"[^\s,;{}\[\]#<>]+")
_BRACKETS = {"{": "}", "<": ">", "[": "]"}
_FIELDS = {
    "instances": "the count of instance_group",
    "max_batch_size": "max_batch_size",
    "dynamic": "dynamic_batching",
    "delay": "max_queue_delay_microseconds",
    "preferred": "preferred_batch_size",
}


@dataclass(frozen=True, order=True)
class Settings:
    """Settings of a model.

    `max_batch_size`: 0 if the model has no batches. `dynamic`: whether the server makes batches;
    `delay` in microseconds and `preferred` sizes are theirs.
    """

    instances: int = 1
    max_batch_size: int = 0
    dynamic: bool = False
    delay: int = 0
    preferred: tuple[int, ...] = ()

    @classmethod
    def of(cls, config: Mapping[str, Any]) -> Settings:
        """Returns those of a configuration, as JSON has it. Raises HostError if they are others."""
        groups = config.get("instance_group", [])
        if len(groups) > 1:
            raise unsupported(f"the model has {len(groups)} instance groups: tune handles one")
        if config.get("sequence_batching") is not None:
            raise unsupported("the model has a sequence batcher: tune handles models without one")
        if config.get("ensemble_scheduling") is not None:
            raise unsupported("the model is an ensemble, which has no instances: tune its steps")
        batching = config.get("dynamic_batching")
        most = int(config.get("max_batch_size", 0))
        preferred = tuple(map(int, (batching or {}).get("preferred_batch_size", [])))
        return cls(
            int(groups[0].get("count", 1)) if groups else 1,
            most,
            batching is not None,
            int((batching or {}).get("max_queue_delay_microseconds", 0)),
            () if preferred == (most,) else preferred,  # the server fills this in
        )

    @property
    def batch(self) -> int:
        """The largest batch that the server makes."""
        return self.max_batch_size if self.dynamic else 1

    def without_batching(self) -> Settings:
        """Returns these settings without batches of the server."""
        return replace(self, dynamic=False, delay=0, preferred=())

    def apply(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Returns a configuration with these settings."""
        groups = [dict(group) for group in config.get("instance_group", [])] or [{}]
        groups[0]["count"] = self.instances
        changed = {
            **config,
            "instance_group": groups,
            "max_batch_size": self.max_batch_size,
        }
        batching = dict(changed.pop("dynamic_batching", None) or {})
        if self.dynamic:
            batching["max_queue_delay_microseconds"] = self.delay
            batching["preferred_batch_size"] = list(self.preferred)
            changed["dynamic_batching"] = batching
        return changed


def edit_text(text: str, before: Settings, after: Settings, path: str) -> str:
    """Returns the text of a `config.pbtxt` with other settings, and all else as it is.

    Raises HostError if the text cannot be parsed, or is written in a way that cannot be edited.
    """
    editor = _Editor(text, path)
    if after.instances != before.instances:
        editor.set("instance_group", "count", str(after.instances), index="[0]")
    if after.max_batch_size != before.max_batch_size:
        editor.set("", "max_batch_size", str(after.max_batch_size))
    if not after.dynamic:
        if before.dynamic:
            editor.remove("dynamic_batching")
    else:
        if not before.dynamic:
            editor.add_message("dynamic_batching")
        if after.delay != before.delay:
            editor.set("dynamic_batching", "max_queue_delay_microseconds", str(after.delay))
        refilled = not after.preferred and after.max_batch_size != before.max_batch_size
        if after.preferred != before.preferred or refilled:
            editor.remove("dynamic_batching.preferred_batch_size")
            if after.preferred:
                sizes = ", ".join(map(str, after.preferred))
                editor.set("dynamic_batching", "preferred_batch_size", f"[ {sizes} ]")
    return editor.text


class _Editor:
    """Replaces values in a text; each change is parsed again."""

    def __init__(self, text: str, path: str) -> None:
        self.text = text
        self._path = path
        self._positions = self._parse()

    def _parse(self) -> Mapping[str, tuple[int, int]]:
        return parse_pbtxt_with_source(self.text, self._path)[1].positions

    def _replace(self, start: int, end: int, new: str) -> None:
        self.text = self.text[:start] + new + self.text[end:]
        self._positions = self._parse()

    def _offset(self, field: str) -> int | None:
        """Where a field begins; None if the text does not have it."""
        if field not in self._positions:
            return None
        line, column = self._positions[field]
        lines = self.text.split("\n")
        return sum(len(one) + 1 for one in lines[: line - 1]) + column - 1

    def set(self, message: str, name: str, value: str, index: str = "") -> None:
        """Sets a field; `message`: the one that it is in, "" for the configuration."""
        field = f"{message}{index}.{name}" if message else name
        start = self._offset(field)
        if start is not None:
            value_start, end = self._value_of(start)
            self._replace(value_start, end, value)
            return
        if not message:
            self._append(f"{name}: {value}")
            return
        start = self._offset(f"{message}{index}")
        if start is None:
            self._append(f"{message} {{ {name}: {value} }}")
            return
        opened, _ = self._value_of(start)
        if self.text[opened] not in "{<":
            raise unsupported(f"'{self._path}': {message} cannot be edited; set {name}: {value}")
        self._insert(opened + 1, f"{name}: {value}")

    def _insert(self, place: int, text: str) -> None:
        """Inserts a field after the opening bracket of a message, in the way it is written."""
        line = self.text[self.text.rfind("\n", 0, place) + 1 : place]
        indent = line[: len(line) - len(line.lstrip())]
        on_lines = self.text[place:].lstrip(" \t").startswith(("\n", "#"))
        self._replace(place, place, f"\n{indent}  {text}" if on_lines else f" {text}")

    def add_message(self, name: str) -> None:
        """Adds an empty message if there is none."""
        if self._offset(name) is None:
            self._append(f"{name} {{ }}")

    def _append(self, line: str) -> None:
        end = len(self.text)
        gap = "" if not self.text or self.text.endswith("\n") else "\n"
        self._replace(end, end, f"{gap}{line}\n")

    def remove(self, field: str) -> None:
        """Removes a field, however often it is given; comments in it stay."""
        while (start := self._offset(field)) is not None:
            _, end = self._value_of(start)
            comments = [
                found[0]
                for found in _COMMENT_OR_STRING.finditer(self.text, start, end)
                if found[0].startswith("#")
            ]
            tail = re.compile(r"[ \t]*[,;]?[ \t]*").match(self.text, end)
            end = tail.end() if tail else end
            line = self.text.rfind("\n", 0, start) + 1
            alone = not self.text[line:start].strip()
            if alone and not comments and self.text[end : end + 1] == "\n":
                start, end = line, end + 1
            self._replace(start, end, "\n".join(comments))

    def _value_of(self, start: int) -> tuple[int, int]:
        """The beginning and the end of the value of the field that begins here."""
        text = self.text
        position = start
        if text[start] not in _BRACKETS:  # the element of a list begins with its value
            position = re.compile(r"\w+").match(text, start).end()  # type: ignore[union-attr]
            position = _skip_space(text, position)
            if text[position] == ":":
                position = _skip_space(text, position + 1)
        first = position
        if text[position] in _BRACKETS:
            return first, _closing(text, position) + 1
        found = _COMMENT_OR_STRING.match(text, position) or _SCALAR.match(text, position)
        if found is None:
            raise unsupported(f"'{self._path}' cannot be edited: change it by hand")
        return first, found.end()


def _skip_space(text: str, position: int) -> int:
    found = _SPACE.match(text, position)
    return found.end() if found else position


def _closing(text: str, position: int) -> int:
    """The position of the bracket that closes the one here."""
    open_brackets: list[str] = []
    while True:
        skipped = _COMMENT_OR_STRING.match(text, position)
        if skipped is not None:
            position = skipped.end()
            continue
        sign = text[position]
        if sign in _BRACKETS:
            open_brackets.append(_BRACKETS[sign])
        elif open_brackets and sign == open_brackets[-1]:
            open_brackets.pop()
            if not open_brackets:
                return position
        position += 1


def check_text(text: str, path: str, before: Settings, after: Settings) -> None:
    """Raises HostError unless the text has the settings that have changed.

    Others may be missing in the text, as `auto_complete_config` of the model fills them in.
    """
    config = parse_pbtxt(text, path)
    group = config.instance_group[0].count if config.instance_group else 1
    batching = config.dynamic_batching
    found = Settings(
        max(1, group),
        config.max_batch_size,
        config.HasField("dynamic_batching"),
        batching.max_queue_delay_microseconds,
        tuple(batching.preferred_batch_size),
    )
    changed = [name for name in _FIELDS if getattr(after, name) != getattr(before, name)]
    if any(getattr(found, name) != getattr(after, name) for name in changed):
        wanted = ", ".join(f"{_FIELDS[name]} {getattr(after, name)}" for name in changed)
        raise unsupported(f"'{path}' cannot be edited: set by hand {wanted}")
