"""The text form of a configuration: reading it with precise complaints, and writing it."""

from __future__ import annotations

from google.protobuf import text_format

from host.config.pbtxt_reader import Reader, SyntaxProblem
from host.config.schema import ModelConfig, new_config
from host.config.source import Source
from host.errors import internal


def parse(text: str, path: str) -> ModelConfig:
    """The configuration written in `text`; `path` is only named in errors.

    Raises HostError INTERNAL unless it is one.
    """
    return parse_with_source(text, path)[0]


def parse_with_source(text: str, path: str) -> tuple[ModelConfig, Source]:
    """The configuration written in `text`, and where each of its fields stands.

    The reader goes first because its complaints are the better ones; protobuf's own parser then
    decides what the text means. Raises HostError INTERNAL, as `parse` does.
    """
    reader = Reader(text)
    try:
        reader.read(new_config().DESCRIPTOR)
        config = text_format.Parse(text, new_config())
    except SyntaxProblem as problem:
        line, column = problem.position
        raise internal(
            f"failed to read text proto from {path}: line {line}, column {column}: {problem}"
        ) from None
    except (text_format.ParseError, ValueError) as error:
        raise internal(f"failed to read text proto from {path}: {error}") from None
    return config, Source(path, reader.positions)


def to_pbtxt(config: ModelConfig) -> str:
    """The configuration in text form, fields in the order of their declaration."""
    return text_format.MessageToString(config, use_index_order=True)
