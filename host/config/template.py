"""Fills the variables `${name}` of a configuration file with values from the command line."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping

from host.config.pbtxt import find_outside_comments, syntax_error

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
