"""Parses and prints configurations in text form (`config.pbtxt`)."""

from __future__ import annotations

from google.protobuf import text_format

from host.config.pbtxt_reader import PbtxtReader, PbtxtSyntaxError
from host.config.schema import ModelConfig, new_config
from host.config.source import ConfigSource
from host.errors import internal


def parse_pbtxt(text: str, path: str) -> ModelConfig:
    """Parse a configuration in text form; `path` is only for error messages.

    Raises HostError INTERNAL if the text is invalid.
    """
    return parse_pbtxt_with_source(text, path)[0]


def parse_pbtxt_with_source(text: str, path: str) -> tuple[ModelConfig, ConfigSource]:
    """Parse a configuration in text form, and find the position of each field.

    `PbtxtReader` checks the text first because it has better error messages; protobuf's own parser
    then makes the message. Raises HostError INTERNAL, like `parse_pbtxt`.
    """
    reader = PbtxtReader(text)
    try:
        reader.read_message(new_config().DESCRIPTOR)
        config = text_format.Parse(text, new_config())
    except PbtxtSyntaxError as problem:
        line, column = problem.position
        raise internal(
            f"failed to read text proto from {path}: line {line}, column {column}: {problem}"
        ) from None
    except (text_format.ParseError, ValueError) as error:
        raise internal(f"failed to read text proto from {path}: {error}") from None
    return config, ConfigSource(path, reader.positions)


def to_pbtxt(config: ModelConfig) -> str:
    """Convert a configuration to text form, with the fields in declaration order."""
    return text_format.MessageToString(config, use_index_order=True)
