"""A configuration reader that continues after a syntax error, to find all errors."""

from __future__ import annotations

import re
from itertools import accumulate
from typing import Any

from host.config.findings import Position
from host.config.pbtxt import TEMPLATE, PbtxtReader, PbtxtSyntaxError
from host.config.schema import Field, closest_choice, enum_names, field_kind

_NEUTRAL_VALUES = {"string": '""', "bool": "false"}
_BRACKETS = {"{": "}", "[": "]", "<": ">"}
_STRAY = frozenset("}]>,;:")
_VARIABLE = re.compile(r"(?<!\$)\$\{\w[^{}\n]*\}")


class _UnrecoverableSyntax(Exception):
    """The brackets do not match, so the reader cannot continue."""


class RecoveringReader(PbtxtReader):
    """Reads one text, once.

    After `read_all`, it has:

    * `problems`: all errors, in the order of the text;
    * `leftovers`: strings that contain a `${variable}`, which is valid but may be a mistake;
    * `repaired`: the text with the errors corrected or removed, None if that is not possible;
    * `guessed`: the paths of fields whose values are unknown and were replaced by neutral ones.
    """

    def __init__(self, text: str) -> None:
        super().__init__(text)
        self.problems: list[PbtxtSyntaxError] = []
        self.leftovers: list[PbtxtSyntaxError] = []
        self.repaired: str | None = None
        self.guessed: set[str] = set()
        self._text = text
        self._starts = [0, *accumulate(len(line) + 1 for line in self._lines)]
        self._edits: list[tuple[int, int, str]] = []
        self._doubled: set[Position] = set()

    def read_all(self, descriptor: Any) -> None:
        """Reads the whole text and continues after errors."""
        try:
            self._fields(descriptor)
        except _UnrecoverableSyntax:
            return
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
            return
        parts, done = [], 0
        # At the same start: insertions first, then the longest edit, which contains the others.
        self._edits.sort(key=lambda edit: (edit[0], edit[0] != edit[1], -edit[1]))
        for start, end, replacement in self._edits:
            if start >= done:  # otherwise it is inside text that is already replaced
                parts += [self._text[done:start], replacement]
                done = end
        self.repaired = "".join(parts) + self._text[done:]

    def _entry(self, descriptor: Any, path: str, seen: dict[str, Position]) -> str:
        start = self._here()
        name = self._tokens.token
        try:
            key = super()._entry(descriptor, path, seen)
            if start in self._doubled:
                self._drop_text(start)
            return key
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
            if self._here() != start:
                raise _UnrecoverableSyntax from None
        # The error is about the field name, which is still the current token.
        if re.fullmatch(r"\w+", name):
            self._tokens.NextToken()
            self._tokens.TryConsume(":")
            self._skip_value()
        elif not self._skip_template():
            if name not in _STRAY:
                raise _UnrecoverableSyntax
            self._tokens.NextToken()
        self._drop_text(start)
        return ""

    def _drop_text(self, start: Position) -> None:
        """Removes the entry that ends here, with the separator after it."""
        if not self._tokens.TryConsume(","):
            self._tokens.TryConsume(";")
        self._replace(start, "")

    def _field_name(self, descriptor: Any, path: str) -> Field:
        try:
            return super()._field_name(descriptor, path)
        except PbtxtSyntaxError as problem:
            name = self._tokens.token
            known = (
                closest_choice(name, descriptor.fields_by_name)
                if re.fullmatch(r"\w+", name)
                else ""
            )
            if not known:
                raise
            self.problems.append(problem)
        start = self._offset(self._here())
        self._edits.append((start, start + len(name), known))
        return descriptor.fields_by_name[known]

    def _check_once(self, field: Field, seen: dict[str, Position], path: str) -> None:
        try:
            super()._check_once(field, seen, path)
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
            self._doubled.add(self._here())

    def _missing(self, sign: str, expected: str, field: Field, path: str) -> None:
        try:
            super()._missing(sign, expected, field, path)
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
            if self._tokens.token in ("", *_BRACKETS.values()):
                raise _UnrecoverableSyntax from None
            start = self._offset(self._here())
            self._edits.append((start, start, f"{sign} "))

    def _no_message(self, field: Field, path: str) -> str:
        start = self._here()
        try:
            return super()._no_message(field, path)
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
            self._guess_value(start, path, "{ }")
        return ""

    def _scalar(self, field: Field, path: str) -> str:
        start, token = self._here(), self._tokens.token
        try:
            value = super()._scalar(field, path)
        except PbtxtSyntaxError as problem:
            self.problems.append(problem)
        else:
            if field_kind(field) == "string" and (left := _VARIABLE.search(value)):
                text = f"template variable '{left[0]}' was not replaced"
                hint = "replace it, unless the model replaces it"
                self.leftovers.append(PbtxtSyntaxError(start, text, path, hint))
            return value
        if field_kind(field) != "enum":
            value = _NEUTRAL_VALUES.get(field_kind(field), "0")
            self._guess_value(start, path, value)
            return value
        known = closest_choice(token.strip("'\""), enum_names(field))
        if known and self._here() == start:
            self._tokens.NextToken()
            self._replace(start, known)
        else:
            self._guess_value(start, path, enum_names(field)[0])
        return ""

    def _guess_value(self, start: Position, path: str, value: str) -> None:
        """Replaces the value at `start` by a neutral one; skips it if it has not been read."""
        if self._here() == start:
            self._skip_value()
        self._replace(start, value)
        self.guessed.add(path)

    def _skip_value(self) -> None:
        """Skips a value of any type."""
        if self._skip_template():
            return
        closing = [_BRACKETS.get(self._tokens.token, "")]
        if self._tokens.AtEnd() or self._tokens.token in _BRACKETS.values():
            raise _UnrecoverableSyntax
        self._tokens.NextToken()
        if not closing[0]:
            return
        while closing:
            token = self._tokens.token
            if self._tokens.AtEnd() or (token in _BRACKETS.values() and token != closing[-1]):
                raise _UnrecoverableSyntax
            if token == closing[-1]:
                closing.pop()
            elif token in _BRACKETS:
                closing.append(_BRACKETS[token])
            self._tokens.NextToken()

    def _skip_template(self) -> bool:
        """Skips a `${variable}`; returns whether there was one."""
        start = self._offset(self._here())
        template = TEMPLATE.match(self._text, start)
        if template is None:
            return False
        while not self._tokens.AtEnd() and self._offset(self._here()) < template.end():
            self._tokens.NextToken()
        return True

    def _replace(self, start: Position, replacement: str) -> None:
        """Replaces the text from `start` to the current token."""
        end = len(self._text) if self._tokens.AtEnd() else self._offset(self._here())
        # The spaces keep adjacent tokens apart.
        self._edits.append((self._offset(start), end, f" {replacement} "))

    def _offset(self, position: Position) -> int:
        line, column = position
        return self._starts[line - 1] + column - 1
