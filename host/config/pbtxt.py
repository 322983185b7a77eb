"""Parses and prints configurations in text form (`config.pbtxt`), and fills their variables."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NoReturn

from google.protobuf import text_format

from host.config.findings import ConfigSource, Position
from host.config.schema import (
    INTEGER_RANGES,
    Field,
    ModelConfig,
    enum_names,
    expected_value,
    field_kind,
    is_map,
    is_repeated,
    new_config,
    range_problem,
    suggestion,
    unknown_field,
)
from host.errors import HostError, internal

TEMPLATE = re.compile(r"\$\{[^}\n]*\}?|\$\w+")
_CLOSING = {"{": "}", "<": ">"}


class PbtxtSyntaxError(Exception):
    """A syntax error at `position`.

    `text` is the problem of `field`, and `hint` a suggestion. The exception's message has both, and
    the words `before` and `after` them that a reader needs without the position.
    """

    def __init__(
        self,
        position: Position,
        text: str,
        field: str = "",
        hint: str = "",
        before: str = "",
        after: str = "",
    ) -> None:
        super().__init__(f"{before}{text}{hint}{after}")
        self.position = position
        self.text = text
        self.field = field
        self.hint = hint.removeprefix(", ")


class PbtxtReader:
    """Reads one text, once. Afterwards, `positions` has the position of each field by its path."""

    def __init__(self, text: str) -> None:
        self.positions: dict[str, Position] = {}
        self._lines = text.split("\n")
        self._tokens: Any = text_format.Tokenizer(self._lines)
        self._lengths: dict[str, int] = {}

    def read_message(self, descriptor: Any) -> None:
        """Reads the whole text as one message. Raises PbtxtSyntaxError."""
        self._fields(descriptor)

    def _here(self) -> Position:
        """The start of the current token. The tokenizer's public API has it only in errors."""
        error = self._tokens.ParseError("")
        return error.GetLine(), error.GetColumn()

    def _fields(
        self, descriptor: Any, path: str = "", closing: str = "", opened: Position = (1, 1)
    ) -> str:
        """Reads the fields of a message and its closing bracket; returns the key of a map entry."""
        seen: dict[str, Position] = {}
        key = ""
        while not (closing and self._tokens.TryConsume(closing)):
            if self._tokens.AtEnd():
                if not closing:
                    break
                text = f"field '{path}' is not closed, expected '{closing}'"
                raise PbtxtSyntaxError(opened, text, path)
            key = self._entry(descriptor, path, seen) or key
            if not self._tokens.TryConsume(","):
                self._tokens.TryConsume(";")
        return key

    def _entry(self, descriptor: Any, path: str, seen: dict[str, Position]) -> str:
        """Reads one field of a message; returns its value if it is the key of a map entry."""
        field = self._field_name(descriptor, path)
        self._check_once(field, seen, path)
        value = self._field(field, f"{path}.{field.name}" if path else field.name)
        return value if field.name == "key" else ""

    def _field_name(self, descriptor: Any, path: str) -> Field:
        name = self._tokens.token
        field = descriptor.fields_by_name.get(name)
        if field is not None:
            return field
        within = f" (field '{path}')" if path else ""
        if re.fullmatch(r"\w+", name):
            text, hint = unknown_field(name, descriptor)
            own = f"{path}.{name}" if path else name
            raise PbtxtSyntaxError(self._here(), text, own, hint, after=within)
        self._reject(f"a field of {descriptor.name}{within}")

    def _check_once(self, field: Field, seen: dict[str, Position], path: str) -> None:
        """Rejects a second value of a field that is not repeated, or a second member of a oneof."""
        choice = field.containing_oneof
        members = [member.name for member in choice.fields] if choice is not None else [field.name]
        earlier = [name for name in members if name in seen]
        seen.setdefault(field.name, self._here())
        if not earlier or is_repeated(field):
            return
        line, column = seen[earlier[0]]
        owner = field.containing_type.name + (f" (field '{path}')" if path else "")
        problem = (
            f"field '{field.name}' of {owner} is given twice"
            if earlier[0] == field.name
            else f"fields '{earlier[0]}' and '{field.name}' of {owner} are both given, "
            f"expected one {choice.name}"
        )
        own = f"{path}.{field.name}" if path else field.name
        first = f", first at line {line}, column {column}"
        raise PbtxtSyntaxError(self._here(), problem + first, own)

    def _field(self, field: Field, path: str) -> str:
        """Reads a field, from its name to its value; returns a singular scalar as text."""
        position = self._here()
        self.positions.setdefault(path, position)
        self._tokens.NextToken()
        if not self._tokens.TryConsume(":") and field_kind(field) != "message":
            self._missing(":", "':'", field, path)
        if not is_repeated(field):
            return self._value(field, path)
        if not self._tokens.TryConsume("["):
            self._element(field, path, position)
        elif not self._tokens.TryConsume("]"):
            self._element(field, path, self._here())
            while not self._tokens.TryConsume("]"):
                if not self._tokens.TryConsume(","):
                    self._missing(",", "',' or ']'", field, path)
                self._element(field, path, self._here())
        return ""

    def _element(self, field: Field, path: str, position: Position) -> None:
        """Reads one element. Its path has the index in the list, or the key in the map."""
        if is_map(field):
            self.positions[f"{path}[{self._value(field, f'{path}[]')}]"] = position
            return
        # A list continues where the field is repeated later in the text.
        index = self._lengths.get(path, 0)
        self._lengths[path] = index + 1
        self.positions[f"{path}[{index}]"] = position
        self._value(field, f"{path}[{index}]")

    def _value(self, field: Field, path: str) -> str:
        if field_kind(field) != "message":
            return self._scalar(field, path)
        closing = _CLOSING.get(self._tokens.token)
        if closing is None:
            return self._no_message(field, path)
        opened = self._here()
        self._tokens.NextToken()
        return self._fields(field.message_type, path, closing, opened)

    def _missing(self, sign: str, expected: str, field: Field, path: str) -> None:
        """Reports a missing punctuation mark; `expected` names it."""
        self._reject(expected, field, path)

    def _no_message(self, field: Field, path: str) -> str:
        """Reports a value that is not a message where a message is required."""
        self._reject("'{'", field, path)

    def _scalar(self, field: Field, path: str) -> str:
        token, position = self._tokens.token, self._here()
        try:
            value = self._consume(field)
        except text_format.ParseError:
            self._reject(expected_value(field), field, path, (token, position))
        bounds = range_problem(field, value)
        if bounds:
            self._reject(bounds, field, path, (token, position))
        return str(value)

    def _consume(self, field: Field) -> Any:
        """Reads a value by the tokenizer's lexical rules. Raises text_format.ParseError."""
        name = field_kind(field)
        if name in INTEGER_RANGES:
            return self._tokens.ConsumeInteger()
        if name == "enum":
            return self._tokens.ConsumeEnum(field)
        if name == "string":
            return self._tokens.ConsumeString()
        return self._tokens.ConsumeBool() if name == "bool" else self._tokens.ConsumeFloat()

    def _reject(
        self,
        expected: str,
        field: Field = None,
        path: str = "",
        at: tuple[str, Position] | None = None,
    ) -> NoReturn:
        """Reports that the current token, or the one `at` a position, is not the expected one."""
        token, position = at or (self._tokens.token, self._here())
        line, column = position
        rest = self._lines[line - 1][column - 1 :] if token else ""
        template = TEMPLATE.match(rest) or TEMPLATE.search(token)
        got, hint = repr(token) if token else "the end of the text", ""
        if at and field is not None and field_kind(field) == "enum":
            hint = suggestion(token.strip("'\""), enum_names(field))
        problem = f"expected {expected}, got {got}"
        if template is not None:
            hint = ""
            problem = f"template variable '{template[0]}' was not replaced, expected {expected}"
        owner = f"field '{path}' of {field.containing_type.name}: " if field is not None else ""
        raise PbtxtSyntaxError(position, problem, path, hint, before=owner)


_NO_COMMENT = re.compile(r"""(?:[^#"']|"(?:\\.|[^"\\])*"?|'(?:\\.|[^'\\])*'?)*""")
"""The part of a line before its comment."""
_UNDECODED = re.compile("[\udc80-\udcff]")  # what `surrogateescape` makes of a byte


def decode_pbtxt(data: bytes, path: str) -> str:
    """Decodes a configuration in text form; `path` is only for error messages.

    Bytes in comments that are not UTF-8 are replaced, as Triton accepts them there. Raises
    HostError INTERNAL for others.
    """
    text = data.decode(errors="surrogateescape")
    for position, found in find_outside_comments(text, _UNDECODED):
        byte = ord(found[0]) - 0xDC00
        raise syntax_error(path, position, f"byte 0x{byte:02x} is not valid UTF-8")
    return _UNDECODED.sub("\ufffd", text)


def find_outside_comments(
    text: str, pattern: re.Pattern[str]
) -> Iterator[tuple[Position, re.Match[str]]]:
    """Yields the matches of a pattern that do not begin in a comment, and their positions."""
    for number, line in enumerate(text.split("\n"), 1):
        before = _NO_COMMENT.match(line)
        end = before.end() if before else 0
        for found in pattern.finditer(line):
            if found.start() < end:
                yield (number, found.start() + 1), found


def syntax_error(path: str, position: Position, problem: object) -> HostError:
    """The error for a problem at a position of a file."""
    line, column = position
    return internal(
        f"failed to read text proto from {path}: line {line}, column {column}: {problem}"
    )


def parse_pbtxt(text: str, path: str) -> ModelConfig:
    """Parses a configuration in text form; `path` is only for error messages.

    Raises HostError INTERNAL if the text is invalid.
    """
    return parse_pbtxt_with_source(text, path)[0]


def parse_pbtxt_with_source(text: str, path: str) -> tuple[ModelConfig, ConfigSource]:
    """Parses a configuration in text form, and finds the position of each field.

    `PbtxtReader` checks the text first because it has better error messages; protobuf's own parser
    then makes the message. Raises HostError INTERNAL, like `parse_pbtxt`.
    """
    reader = PbtxtReader(text)
    try:
        reader.read_message(new_config().DESCRIPTOR)
        config = text_format.Parse(text, new_config())
    except PbtxtSyntaxError as problem:
        raise syntax_error(path, problem.position, problem) from None
    except (text_format.ParseError, ValueError) as error:
        raise internal(f"failed to read text proto from {path}: {error}") from None
    return config, ConfigSource(path, reader.positions)


def to_pbtxt(config: ModelConfig) -> str:
    """Converts a configuration to text form, with the fields in declaration order."""
    return text_format.MessageToString(config, use_index_order=True)


_VARIABLE = re.compile(r"(\$?)\$\{([^{}\n]*)\}")
_NAME = re.compile(r"[A-Za-z_]\w*")


def parse_assignment(text: str) -> tuple[str, str]:
    """Splits `name=value`. Raises ValueError."""
    name, equals, value = text.partition("=")
    if not equals or not _NAME.fullmatch(name.strip()):
        raise ValueError(f"expected NAME=VALUE, got '{text}'")
    return name.strip(), value


def parse_assignments(lines: Iterable[str]) -> dict[str, str]:
    """Parses the lines of a file of values.

    Empty lines, and lines that begin with `#`, are skipped. Raises ValueError with the line.
    """
    values: dict[str, str] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        try:
            name, values[name] = parse_assignment(line)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    return values


def fill_template(text: str, values: Mapping[str, str], path: str) -> str:
    """Replaces each `${name}` outside of comments by its value; `$${` becomes `${`.

    `path` is only for error messages. Raises HostError INTERNAL for a variable without a value.
    """
    for position, found in find_outside_comments(text, _VARIABLE):
        name = found[2]
        if not found[1] and name not in values:
            raise syntax_error(
                path,
                position,
                f"template variable '${{{name}}}' has no value, set it with --set {name}=VALUE",
            )
    return _replace(text, values, unescape=True)


def fill_known_variables(text: str, values: Mapping[str, str]) -> str:
    """Like `fill_template`, but leave escapes and variables without a value as they are."""
    return _replace(text, values, unescape=False)


def _replace(text: str, values: Mapping[str, str], unescape: bool) -> str:
    lines = text.split("\n")
    # From the end, so that earlier columns stay valid.
    for (line, column), found in reversed([*find_outside_comments(text, _VARIABLE)]):
        if found[1]:
            new = found[0][1:] if unescape else found[0]
        else:
            new = values.get(found[2], found[0])
        before, after = lines[line - 1][: column - 1], lines[line - 1][found.end() :]
        lines[line - 1] = before + new + after
    return "\n".join(lines)
