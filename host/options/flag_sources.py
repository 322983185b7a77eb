"""Flags that environment variables and a configuration file give, as arguments.

A flag on the command line takes precedence over its variable, and the variable over the file.
"""

from __future__ import annotations

import difflib
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host.options.flag_parser import parse_flags
from host.options.flags import Flag, InvalidValue
from host.system.regular_file import read_file

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PREFIX = "PBHOST_"
_KUBERNETES = ("tcp://", "udp://", "sctp://")  # values of variables about its services


def environment_arguments(
    environment: Mapping[str, str], flags: Sequence[Flag], given: Iterable[str]
) -> list[str]:
    """Returns arguments for the variables `PBHOST_<FLAG>` of flags whose field is not `given`.

    A flag that can be repeated has one value per line. Raises InvalidValue, which names the
    variable.
    """
    found: list[str] = []
    for flag in flags:
        variable = _PREFIX + flag.name.upper().replace("-", "_")
        text = environment.get(variable)
        if text is None or flag.field in given or text.startswith(_KUBERNETES):
            continue
        values = text.splitlines() if flag.kind.add is not None else [text]
        found += _checked(variable, flag, values, flags)
    return found


def file_arguments(path: str, flags: Sequence[Flag], given: Iterable[str]) -> list[str]:
    """Returns arguments for the keys of a TOML file, for flags whose field is not `given`.

    Reads the file. Raises InvalidValue, which names the file and the line.
    """
    try:
        text = read_file(Path(path)).decode()
        document = tomllib.loads(text)
    except OSError as error:
        raise InvalidValue(f"cannot read '{path}': {error.strerror or error}") from None
    except ValueError as error:  # also for bytes that are not UTF-8
        raise InvalidValue(f"{path}: {error}") from None
    by_name = {name: flag for flag in flags for name in (flag.name, flag.also) if name}
    found: list[str] = []
    for key, value in document.items():
        place = f"{path}:{_line(text, key)}"
        flag = by_name.get(key.replace("_", "-"))
        if flag is None:
            close = difflib.get_close_matches(key.replace("_", "-"), by_name, n=1)
            meant = f", did you mean '{close[0]}'?" if close else ""
            raise InvalidValue(f"{place}: unrecognized option '{key}'{meant}")
        if flag.name == "config-file":
            raise InvalidValue(f"{place}: a configuration file cannot name another one")
        repeated = isinstance(value, list) and flag.kind.add is not None
        values = [_text(place, key, each) for each in (value if repeated else [value])]
        if flag.field not in given:
            found += _checked(place, flag, values, flags)
    return found


def _checked(
    source: str, flag: Flag, values: Sequence[str], flags: Sequence[Flag]
) -> Sequence[str]:
    """Returns the arguments of a flag. Raises InvalidValue, which begins with the source."""
    if flag.kind.word:
        arguments = [f"--{flag.name}={value}" for value in values]
    elif values[0] not in ("true", "false"):
        raise InvalidValue(f"{source}: '{flag.name}' must be true or false, got '{values[0]}'")
    else:
        arguments = [f"--{flag.name}"] if values[0] == "true" else []
    try:
        parse_flags(arguments, flags)
    except InvalidValue as error:
        raise InvalidValue(f"{source}: {error}", error.advice) from None
    return arguments


def _text(place: str, key: str, value: Any) -> str:
    """Returns a value of TOML as the text of a flag. Raises InvalidValue."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (str, int, float)):
        return str(value)
    raise InvalidValue(
        f"{place}: '{key}' must be a text, a number or a boolean, or an array of them if the flag"
        " can be repeated"
    )


def _line(text: str, key: str) -> int:
    """Returns the number of the line with a key or table; 1 if the key is written otherwise."""
    found = re.search(rf"""^[ \t]*\[?[ \t]*["']?{re.escape(key)}\b""", text, re.MULTILINE)
    return text.count("\n", 0, found.start()) + 1 if found else 1
