"""Parses and prints configurations in text form (`config.pbtxt`)."""

from __future__ import annotations

import re
from collections.abc import Iterator

from google.protobuf import text_format

from host.config.findings import ConfigSource, Position
from host.config.pbtxt_reader import PbtxtReader, PbtxtSyntaxError
from host.config.schema import ModelConfig, new_config
from host.errors import HostError, internal

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
