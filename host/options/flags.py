"""Command-line flags: descriptions of them, and a parser with Triton's rules."""

from __future__ import annotations

import dataclasses
import difflib
import enum
import re
import textwrap
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any, TypeVar

from host.system.resources import MAX_BYTES, SizeOutOfBound, read_byte_size

_Value = TypeVar("_Value")
_INTEGER = re.compile(r"\s*[+-]?[0-9]+")
_FLOAT = re.compile(r"\s*[+-]?([0-9]+\.?[0-9]*|\.[0-9]+)([eE][+-]?[0-9]+)?")


class Status(enum.Enum):
    """Whether a flag has an effect. The value is in the usage text, before the reason."""

    HONOURED = ""
    IGNORED = "Accepted without effect"
    REFUSED = "Not supported by this version"


class InvalidValue(Exception):
    """The value of a flag, or its text, is invalid; `advice` says what would be valid."""

    def __init__(self, text: str, advice: str = "") -> None:
        super().__init__(text)
        self.advice = advice


@dataclass(frozen=True, slots=True)
class ValueKind:
    """How the text of a flag is parsed. `word`: its type in the usage text, "" without a value.

    `read` raises InvalidValue. With `add`, the flag can be repeated: `add` combines the earlier
    value with the next one.
    """

    word: str
    read: Callable[[str], Any]
    add: Callable[[Any, Any], Any] | None = None


@dataclass(frozen=True, slots=True)
class Flag:
    """A flag and the field that it sets. `check` raises InvalidValue for an invalid value.

    `also` is a second name. `reason` tells why the flag has no effect.
    """

    name: str
    field: str
    default: Any
    kind: ValueKind
    group: str
    help: str
    status: Status
    check: Callable[[Any], object] | None = None
    also: str = ""
    reason: str = ""

    @property
    def choices(self) -> tuple[str, ...]:
        """The values that are possible, if they are few; otherwise empty."""
        if self.kind is BOOLEAN:
            return ("true", "false")
        return self.check.choices if isinstance(self.check, Choices) else ()

    @property
    def status_text(self) -> str:
        """A sentence about a flag without its usual effect; empty for other flags."""
        if self.status is Status.HONOURED:
            return ""
        return f"{': '.join(filter(None, [self.status.value, self.reason]))}."

    @property
    def help_text(self) -> str:
        """The description of the flag, its default and its status."""
        told = self.status is Status.HONOURED and self.kind.word
        default = _format_default(self.default) if told else ""
        return " ".join(
            filter(None, [self.help, default and f"Default: {default}.", self.status_text])
        )


@dataclass(frozen=True, slots=True)
class DeprecatedFlag:
    """A deprecated flag. `replace` returns the (flag, text) pairs that replace it."""

    name: str
    kind: ValueKind
    help_text: str
    replace: Callable[[Any], list[tuple[str, str]]]


@dataclass(frozen=True, slots=True)
class FlagGroup:
    """Makes the fields of one group: `group(default, help)` is the value of a field."""

    title: str
    status: Status = Status.HONOURED
    reason: str = ""

    def __call__(
        self,
        default: _Value,
        help: str,
        kind: ValueKind | None = None,
        status: Status | None = None,
        check: Callable[[Any], object] | None = None,
        name: str = "",
        also: str = "",
        reason: str = "",
    ) -> _Value:
        """Makes a field whose name becomes the flag's name; the default selects the kind."""
        kind = kind or _KINDS[type(default)]
        status = status or self.status
        reason = reason or self.reason
        made = Flag(name, "", default, kind, self.title, help, status, check, also, reason)
        if isinstance(default, (list, dict)):
            return dataclasses.field(default_factory=lambda: copy(default), metadata={"flag": made})
        return dataclasses.field(default=default, metadata={"flag": made})


def flags_of(owner: type) -> list[Flag]:
    """Returns the flags of a dataclass whose fields were made by groups: its own, then others."""
    bases = filter(dataclasses.is_dataclass, owner.__bases__)
    inherited = {field.name for base in bases for field in dataclasses.fields(base)}
    return [
        dataclasses.replace(flag, field=field.name, name=flag.name or field.name.replace("_", "-"))
        for field in sorted(dataclasses.fields(owner), key=lambda one: one.name in inherited)
        if (flag := field.metadata.get("flag")) is not None
    ]


def _format_default(value: Any) -> str:
    """Formats a value as on a command line; empty for an empty value, a list or a dict."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:g}"
    return str(value) if isinstance(value, (int, str)) else ""


def _read_bool(text: str) -> bool:
    """Parses true/on/1 or false/off/0, in any case. Raises InvalidValue."""
    lower = text.lower()
    if lower in ("true", "on", "1"):
        return True
    if lower in ("false", "off", "0"):
        return False
    raise InvalidValue(f"invalid value for bool option: {text}")


def integer(low: int = -(2**31), high: int = 2**31 - 1) -> ValueKind:
    """Returns a kind for integers in a range. Unlike in Triton, nothing may follow the number."""
    return ValueKind("integer", lambda text: _read_integer(text, low, high))


def _read_integer(text: str, low: int, high: int) -> int:
    if not _INTEGER.fullmatch(text):
        raise InvalidValue(f"Invalid option value. Got {text}")
    # Longer texts are out of range, and Python refuses to convert very long ones.
    value = int(text) if len(text) < 40 else high + 1
    if not low <= value <= high:
        raise _out_of_bound(text)
    return value


def _out_of_bound(text: str, advice: str = "") -> InvalidValue:
    return InvalidValue(f"Provided option value is out of bound. Got {text}", advice)


def byte_size(low: int = 0) -> ValueKind:
    """Returns a kind for sizes in bytes of at least `low`, such as 8589934592 or 8Gi."""

    def read(text: str) -> int:
        try:
            size = read_byte_size(text.lstrip().removeprefix("+"))
        except SizeOutOfBound as error:
            raise _out_of_bound(text, str(error)) from None
        except ValueError as error:
            if _INTEGER.fullmatch(text):  # a negative one
                raise _out_of_bound(text) from None
            raise InvalidValue(f"Invalid option value. Got {text}", str(error)) from None
        if size < low:
            raise _out_of_bound(text)
        return size

    return ValueKind("bytes", read)


def _read_float(text: str) -> float:
    if not _FLOAT.fullmatch(text):
        raise InvalidValue(f"Invalid option value. Got {text}")
    value = float(text)
    if value in (float("inf"), -float("inf")):
        raise _out_of_bound(text)
    return value


@dataclass(frozen=True, slots=True)
class Choices:
    """Checks that the value of a flag is one of the choices. `flag`: its name in the error."""

    flag: str
    choices: tuple[str, ...]

    def __call__(self, value: Any) -> None:
        """Raises InvalidValue for another value."""
        if value not in self.choices:
            choices = {choice.lower(): choice for choice in self.choices}
            close = difflib.get_close_matches(str(value).lower(), choices, n=1)
            meant = f", did you mean '{choices[close[0]]}'?" if close else ""
            raise InvalidValue(f"invalid argument for --{self.flag}", f"got '{value}'{meant}")


def one_of(flag: str, *choices: str) -> Choices:
    """Returns a check that the value of a flag is one of the choices."""
    return Choices(flag, choices)


def check_values(owner: Any, flags: Iterable[Flag]) -> None:
    """Checks the fields of an instance. Raises InvalidValue for the first unusable value."""
    for flag in flags:
        value = getattr(owner, flag.field)
        try:
            if flag.check is not None:
                flag.check(value)
            if flag.status is Status.REFUSED and value != flag.default:
                raise InvalidValue(f"--{flag.name} is not supported by this version: {flag.reason}")
        except InvalidValue as error:
            raise invalid_flag_value(flag, error) from None


def _append(values: list[Any], value: Any) -> list[Any]:
    return [*values, value]


BOOLEAN = ValueKind("boolean", _read_bool)
STRING = ValueKind("string", str)
LOWERCASE = ValueKind("string", str.lower)
"""A word that is read without regard to case."""
PORT = integer(0, 65535)
SIZE = integer(0, MAX_BYTES)
BYTES = byte_size()
SWITCH = ValueKind("", lambda _: True)

_KINDS = {
    bool: BOOLEAN,
    int: integer(),
    float: ValueKind("float", _read_float),
    str: STRING,
    list: ValueKind("string", str, _append),
}


def invalid_flag_value(flag: Flag | DeprecatedFlag, error: InvalidValue) -> InvalidValue:
    """Returns the error for an invalid value of a flag."""
    advice = "\n".join(filter(None, (error.advice, usage_advice(flag))))
    return InvalidValue(f'Bad option: "--{flag.name}".\n{error}', advice)


def usage_advice(flag: Flag | DeprecatedFlag) -> str:
    """Returns the usage text of a flag, for errors; "" if the error says all."""
    if isinstance(flag, Flag) and flag.status is Status.REFUSED:
        return ""  # the message is complete
    return f"--{flag.name} <{flag.kind.word}>: {flag.help_text}"


_HELP = DeprecatedFlag(
    "help", SWITCH, "Print usage; --help=TEXT: only the flags that have TEXT", lambda _: []
)


class HelpRequested(Exception):
    """The command line asks for the usage text, of flags that contain `search`."""

    def __init__(self, search: str) -> None:
        super().__init__()
        self.search = search


@dataclass(slots=True)
class CommandLine:
    """What a command line says.

    `values`: by field. `texts`: names of all flags that were given, with their texts. `deprecated`:
    deprecated flags, with their values. `positional`: the other arguments.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    texts: list[tuple[str, str]] = dataclasses.field(default_factory=list)
    deprecated: list[tuple[DeprecatedFlag, Any]] = dataclasses.field(default_factory=list)
    positional: list[str] = dataclasses.field(default_factory=list)

    @property
    def names(self) -> set[str]:
        """The flags that were given."""
        return {name for name, _ in self.texts}

    def set(self, flag: Flag, text: str) -> None:
        """Parses the value of a flag. Raises InvalidValue."""
        value = _parse_value(flag, text)
        if flag.kind.add is not None:
            value = flag.kind.add(self.values.get(flag.field, type(flag.default)()), value)
        self.values[flag.field] = value


def parse_flags(
    argv: Sequence[str], flags: Sequence[Flag], aliases: Sequence[DeprecatedFlag] = ()
) -> CommandLine:
    """Parses a command line.

    Accepts `--flag=value`, `--flag value`, unique prefixes, and `--` after the flags; positional
    arguments may stand anywhere. Raises InvalidValue, and HelpRequested for `--help` and `-h`.
    """
    by_name = {flag.name: flag for flag in flags}
    line = CommandLine()
    for flag, text in _split_arguments(argv, [_HELP, *flags, *aliases], line.positional):
        if flag is _HELP:
            raise HelpRequested(text)
        line.texts.append((flag.name, text))
        if isinstance(flag, Flag):
            line.set(flag, text)
        else:
            value = _parse_value(flag, text)
            line.deprecated.append((flag, value))
            for name, replacement in flag.replace(value):
                line.set(by_name[name], replacement)
    return line


def _parse_value(flag: Flag | DeprecatedFlag, text: str) -> Any:
    try:
        return flag.kind.read(text)
    except InvalidValue as error:
        raise invalid_flag_value(flag, error) from None


def _split_arguments(
    argv: Sequence[str], known: Sequence[Flag | DeprecatedFlag], positional: list[str]
) -> Iterator[tuple[Any, str]]:
    """Yields each flag with its text, and appends the other arguments to `positional`."""
    names = {
        name: flag for flag in known for name in (flag.name, getattr(flag, "also", "")) if name
    }
    rest = iter(argv)
    for argument in rest:
        if argument == "--":
            positional += rest
        elif argument == "-h":
            yield _HELP, ""
        elif argument.startswith("--"):
            written, equals, text = argument[2:].partition("=")
            flag = names[_resolve_prefix(written, names)]
            if flag.kind.word and not equals:
                value = next(rest, None)
                if value is None or _is_flag(value, names):
                    raise InvalidValue(
                        f"option '--{flag.name}' requires an argument", usage_advice(flag)
                    )
                text = value
            elif equals and not flag.kind.word and flag is not _HELP:
                raise InvalidValue(f"option '--{flag.name}' doesn't allow an argument")
            yield flag, text
        elif argument.startswith("-") and argument != "-":
            raise InvalidValue(f"unrecognized option '{argument}'{_suggestion(argument, names)}")
        else:
            positional.append(argument)


def _is_flag(argument: str, names: Container[str]) -> bool:
    """Whether an argument is a flag. As a value of another flag, it needs `--flag=value`."""
    return argument.startswith("--") and argument[2:].partition("=")[0] in names


def _resolve_prefix(written: str, names: Iterable[str]) -> str:
    """Returns the name itself, or the only name that starts with it. Raises InvalidValue."""
    if written in names:
        return written
    matches = [name for name in names if written and name.startswith(written)]
    if len(matches) == 1:
        return matches[0]
    if matches:
        possible = " ".join(f"'--{name}'" for name in matches)
        raise InvalidValue(f"option '--{written}' is ambiguous; possibilities: {possible}")
    raise InvalidValue(f"unrecognized option '--{written}'{_suggestion(written, names)}")


def _suggestion(written: str, names: Iterable[str]) -> str:
    close = difflib.get_close_matches(written.lstrip("-").replace("_", "-").lower(), names, n=1)
    return f", did you mean '--{close[0]}'?" if close else ""


def usage(
    synopsis: str,
    flags: Iterable[Flag],
    aliases: Iterable[DeprecatedFlag] = (),
    about: str = "",
    search: str = "",
) -> str:
    """Returns the text of `--help`: a paragraph of `about`, all flags by group, the rest.

    `search`: returns only the flags with this text in their name or description.
    """
    if search:
        return _usage_of_found([*flags, *aliases], search)
    description, _, epilog = about.partition("\n\n")
    lines = [f"Usage: pbhost {synopsis} [options]", *(["", description, ""] if about else [])]
    lines += _usage_entry("help", "", _HELP.help_text)
    group = ""
    for flag in flags:
        if flag.group != group:
            group = flag.group
            lines += ["", f"{group}:"]
        if flag.also:
            lines += _usage_entry(flag.also, flag.kind.word, f"Equivalent to --{flag.name}.")
        lines += _usage_entry(flag.name, flag.kind.word, flag.help_text)
    if aliases:
        lines += ["", "DEPRECATED:"]
    for alias in aliases:
        lines += _usage_entry(alias.name, alias.kind.word, f"DEPRECATED: {alias.help_text}")
    return "\n".join([*lines, *(["", epilog] if epilog else [])]) + "\n"


def _usage_of_found(flags: Iterable[Flag | DeprecatedFlag], search: str) -> str:
    """Returns the usage text of the flags that contain a text, those with it in the name first."""
    text = search.lower()
    named = [flag for flag in flags if text in flag.name or text in getattr(flag, "also", "")]
    told = [flag for flag in flags if flag not in named and text in flag.help_text.lower()]
    lines = [
        line
        for flag in (*named, *told)
        for line in _usage_entry(flag.name, flag.kind.word, flag.help_text)
    ]
    return "\n".join(lines or [f"no flag has '{search}' in its name or description"]) + "\n"


def _usage_entry(name: str, word: str, help: str) -> list[str]:
    lines = textwrap.wrap(help, 72, initial_indent="\t", subsequent_indent="\t", tabsize=8)
    return [f"  --{name} <{word}>" if word else f"  --{name}", *lines]


def describe_misuse(command: str, error: str, advice: str) -> str:
    """Returns one line about an invalid command line."""
    parts = [*error.splitlines(), *advice.splitlines(), f"See pbhost {command} --help"]
    return f"pbhost {command}: " + "; ".join(part.strip().rstrip(".") for part in parts)
