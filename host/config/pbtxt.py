"""The text form of a configuration: reading it with precise complaints, and writing it."""

from __future__ import annotations

from google.protobuf import text_format

from host.config.pbtxt_reader import PbtxtReader, PbtxtSyntaxError
from host.config.schema import ModelConfig, new_config
from host.config.source import ConfigSource
from host.errors import internal


def parse_pbtxt(text: str, path: str) -> ModelConfig:
    """The configuration written in `text`; `path` is only named in errors.

    Raises HostError INTERNAL unless it is one.
    """
    return parse_pbtxt_with_source(text, path)[0]


def parse_pbtxt_with_source(text: str, path: str) -> tuple[ModelConfig, ConfigSource]:
    """The configuration written in `text`, and where each of its fields stands.

    The reader goes first because its complaints are the better ones; protobuf's own parser then
    decides what the text means. Raises HostError INTERNAL, as `parse_pbtxt` does.
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
    """The configuration in text form, fields in the order of their declaration."""
    return text_format.MessageToString(config, use_index_order=True)
