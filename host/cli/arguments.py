"""Parses the command lines of the subcommands, and ends those that fail."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import msgspec

from host.errors import HostError
from host.logs.formats import escape_control_characters
from host.options.flags import (
    SIZE,
    Flag,
    FlagGroup,
    HelpRequested,
    InvalidValue,
    check_values,
    describe_misuse,
    flags_of,
    one_of,
    parse_flags,
    usage,
)

EXIT_FAILED, EXIT_USAGE = 1, 2
DEFAULT_URL = "http://localhost:8000"

_Options = TypeVar("_Options")


def parse_texts(
    argv: Sequence[str], synopsis: str, about: str, owner: type[_Options]
) -> tuple[list[str], _Options]:
    """Returns the positional arguments, and the flags as an instance of `owner`, a dataclass.

    As `parse_with_others`, without other flags.
    """
    positional, options, _ = parse_with_others(argv, synopsis, about, owner, ())
    return positional, options


def parse_with_others(
    argv: Sequence[str], synopsis: str, about: str, owner: type[_Options], others: Sequence[Flag]
) -> tuple[list[str], _Options, list[tuple[Flag, str]]]:
    """Returns the positional arguments, the flags of `owner`, and the `others` with their texts.

    `synopsis`: the command, its positional arguments, and `...` if the last one may be repeated, or
    left out if it is a `[MODEL]`. A `[URL]` in front of them is `DEFAULT_URL` if it is left out.
    Exits with status 0 after `--help`, which shows `about` too, and with 2 for an invalid command
    line.
    """
    command, *names = synopsis.split()
    repeated = names[-1:] == ["..."]
    required = [name for name in names if name != "..." and not name.startswith("[MODEL")]
    own = flags_of(owner)
    flags = [*own, *others]
    try:
        line = parse_flags(argv, flags)
        if synopsis.startswith(f"{command} [URL") and _lacks_url(
            line.positional, required, repeated
        ):
            line.positional.insert(0, DEFAULT_URL)
        given = len(line.positional)
        if given < len(required):
            missing = ", ".join(required[given:])
            raise InvalidValue(f"the following arguments are required: {missing}")
        if given > len(required) and not repeated:
            raise InvalidValue(f"Unexpected argument: {line.positional[len(required)]}")
        options = owner(**{f.field: line.values[f.field] for f in own if f.field in line.values})
        check_values(options, own)
    except HelpRequested as asked:
        shown = flags if asked.search else own  # the others are those of another command
        sys.stdout.write(usage(synopsis, shown, about=about, search=asked.search))
        sys.exit(0)
    except InvalidValue as error:
        fail_misuse(command, error)
    by_name = {flag.name: flag for flag in others}
    texts = [(by_name[name], text) for name, text in line.texts if name in by_name]
    return list(line.positional), options, texts


def _lacks_url(given: Sequence[str], required: Sequence[str], repeated: bool) -> bool:
    """Whether the arguments begin with the second one; a wrong URL alone is still a URL."""
    if not given or len(required) == 1:
        return not given
    return "://" not in given[0] and (repeated or len(given) < len(required))


@contextmanager
def errors_end(command: str, *usage: type[Exception], one_line: bool = False) -> Iterator[None]:
    """Ends the process with a message for an error: with status 2 for those of `usage`, else 1.

    `one_line`: also if the text has several. Ctrl-C ends it with 1 and without a message.
    """
    try:
        yield
    except InvalidValue as error:
        fail_misuse(command, error)
    except UnicodeEncodeError as error:
        text, status = f"expected UTF-8, got {error.object!a}", EXIT_USAGE
    except usage as error:
        text, status = str(error), EXIT_USAGE
    except HostError as error:
        text, status = error.message, EXIT_FAILED
    except KeyboardInterrupt:
        sys.exit(EXIT_FAILED)
    else:
        return
    fail(command, " ".join(text.split()) if one_line else text, status)


def fail(command: str, text: str, status: int = EXIT_FAILED) -> NoReturn:
    """Ends the process with a message on stderr."""
    sys.stderr.write(f"pbhost {command}: {escape_control_characters(text)}\n")
    sys.exit(status)


def fail_misuse(command: str, error: InvalidValue) -> NoReturn:
    """Ends the process with a line about an invalid command line."""
    sys.stderr.write(f"{describe_misuse(command, str(error), error.advice)}\n")
    sys.exit(EXIT_USAGE)


def check_positive(number: float) -> None:
    """Raises InvalidValue unless the number is greater than 0."""
    if number <= 0:
        raise InvalidValue(f"expected a number greater than 0, got {number:g}")


def check_inputs(texts: Sequence[str]) -> None:
    """Raises InvalidValue unless each text is NAME=VALUE."""
    for text in texts:
        if text.find("=") < 1:
            raise InvalidValue(f"expected NAME=VALUE, got '{text}'")


def split_inputs(texts: Sequence[str]) -> list[tuple[str, str]]:
    """Returns NAME=VALUE texts as pairs."""
    return [(name, value) for name, _, value in (text.partition("=") for text in texts)]


def format_flag(group: FlagGroup) -> Any:
    """Returns the dataclass field of a `--format` that is text or json."""
    return group("text", "Output format: text or json.", check=one_of("format", "text", "json"))


def to_json(value: object) -> str:
    """Returns the output of `--format=json`."""
    return msgspec.json.format(msgspec.json.encode(value), indent=2).decode() + "\n"


INPUT_VALUES = """\
In --input NAME=VALUE, VALUE is one of
  JSON         a value or nested arrays; {} gives the data type
  @FILE.json   JSON from a file
  @FILE.npy    an array saved by numpy; its dtype must be that of the input
  @FILE        the bytes of any other file, for a TYPE_STRING input
  random       random values, the same in each run; variable dimensions have size 1
For a TYPE_STRING input, text that is not JSON is used as it is. A missing batch dimension is
added, and a single number or text becomes a tensor of one element."""


def input_flag(group: FlagGroup) -> Any:
    """Returns the dataclass field of the `--input` of one request."""
    return group(
        [],
        "Input of the request, as NAME=VALUE; repeat the flag for each input.",
        check=check_inputs,
    )


def version_flag(group: FlagGroup) -> Any:
    """Returns the dataclass field of a `--version` of requests."""
    return group(None, "Version of the model; by default, the server chooses.", SIZE)


@dataclass
class NoOptions:
    """Of a command without flags."""
