"""Reads flags from command lines as `getopt_long` does, and writes their usage text."""

from __future__ import annotations

import dataclasses
import difflib
import textwrap
from collections.abc import Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from host.options.flags import (
    SWITCH,
    DeprecatedFlag,
    Flag,
    InvalidValue,
    invalid_flag_value,
    usage_advice,
)

_HELP = DeprecatedFlag("help", SWITCH, "Print usage", lambda _: [])


@dataclass(slots=True)
class CommandLine:
    """What a command line says.

    `values`: by field. `names`: of all flags that were given. `deprecated`: deprecated flags, with
    their values. `positional`: the other arguments.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    names: list[str] = dataclasses.field(default_factory=list)
    deprecated: list[tuple[DeprecatedFlag, Any]] = dataclasses.field(default_factory=list)
    positional: list[str] = dataclasses.field(default_factory=list)

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
    arguments may stand anywhere. Raises InvalidValue, with an empty text for `--help` and `-h`.
    """
    by_name = {flag.name: flag for flag in flags}
    line = CommandLine()
    for flag, text in _split_arguments(argv, [_HELP, *flags, *aliases], line.positional):
        if flag is _HELP:
            raise InvalidValue("")
        line.names.append(flag.name)
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
            elif equals and not flag.kind.word:
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
    synopsis: str, flags: Iterable[Flag], aliases: Iterable[DeprecatedFlag] = (), about: str = ""
) -> str:
    """Returns the text of `--help`: a paragraph of `about`, all flags by group, the rest."""
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


def _usage_entry(name: str, word: str, help: str) -> list[str]:
    lines = textwrap.wrap(help, 72, initial_indent="\t", subsequent_indent="\t", tabsize=8)
    return [f"  --{name} <{word}>" if word else f"  --{name}", *lines]


def describe_misuse(command: str, error: str, advice: str) -> str:
    """Returns one line about an invalid command line."""
    parts = [*error.splitlines(), *advice.splitlines(), f"See pbhost {command} --help"]
    return f"pbhost {command}: " + "; ".join(part.strip().rstrip(".") for part in parts)
