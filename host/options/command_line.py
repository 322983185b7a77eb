"""The command line of the server: flags from arguments, environment and files; deprecated flags.

A flag on the command line takes precedence over its variable, and the variable over the file.
"""

from __future__ import annotations

import difflib
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host.options.flags import (
    BOOLEAN,
    BYTES,
    STRING,
    CommandLine,
    DeprecatedFlag,
    Flag,
    HelpRequested,
    InvalidValue,
    integer,
    parse_flags,
)
from host.options.flags import usage as usage_text
from host.options.options import Options, UsageError
from host.options.server_flags import FLAGS
from host.repository.object_store.location import is_store_url
from host.system.files import read_file
from stub.wire.paths import absolute_path


def _trace(setting: str) -> Any:
    return lambda value: [("trace-config", f"{setting}={value}")]


DEPRECATED = [
    DeprecatedFlag(
        "strict-model-config",
        BOOLEAN,
        "Please use '--disable-auto-complete-config' instead.",
        lambda strict: [("disable-auto-complete-config", "")] if strict else [],
    ),
    DeprecatedFlag(
        "response-cache-byte-size",
        BYTES,
        "Please use --cache-config local,size=<bytes> instead.",
        lambda size: [("cache-config", f"local,size={size}")] if size else [],
    ),
    *(
        DeprecatedFlag(
            f"trace-{name}", kind, f"Please use --trace-config {setting}=<value>.", _trace(setting)
        )
        for name, kind, setting in (
            ("file", STRING, "triton,file"),
            ("level", STRING, "level"),
            ("rate", integer(0), "rate"),
            ("count", integer(-1), "count"),
            ("log-frequency", integer(0), "triton,log-frequency"),
        )
    ),
    DeprecatedFlag(
        "stay-awake",
        BOOLEAN,
        "Please use --busy-poll instead.",
        lambda enabled: [("busy-poll", str(enabled).lower())],
    ),
]


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


_SYNOPSIS = "Usage: pbhost serve [options]; `pbhost serve --help` lists them"


_ABOUT = """\
Serves the models of one repository or of several over gRPC and HTTP until SIGINT or SIGTERM.

examples:
  pbhost serve models
  pbhost serve --help=cache

exit status: 0 stopped by a signal; 1 the server cannot start, or has not stopped in time"""


def usage(search: str = "") -> str:
    """Returns the text of `--help`, or of the flags that contain a text."""
    return usage_text("serve [REPOSITORY ...]", FLAGS, DEPRECATED, _ABOUT, search)


def parse(argv: Sequence[str]) -> Options:
    """Parses the arguments after the program's name.

    Flags that are not there come from environment variables and from the file of `--config-file`.

    Raises UsageError; its text is the error, for `--help` the usage.
    """
    try:
        line = _parse_with_sources(argv)
        _check_given(line)
        options = Options(**line.values)
    except HelpRequested as asked:
        raise UsageError("", usage(asked.search)) from None
    except (InvalidValue, UsageError) as error:
        detail = error.detail if isinstance(error, UsageError) else str(error)
        raise UsageError(detail, _SYNOPSIS, error.advice) from None
    options.warnings[:0] = _deprecation_warnings(line)
    options.warnings += [
        f"--model-repository: '{path}' contains a config.pbtxt, so it is probably a model"
        f" directory; its repository is '{os.path.dirname(os.path.normpath(absolute_path(path)))}'"
        for path in line.values["model_repository"]
        if not is_store_url(path) and os.path.isfile(os.path.join(path, "config.pbtxt"))
    ]
    return options


def _parse_with_sources(argv: Sequence[str]) -> CommandLine:
    line = parse_flags(argv, FLAGS, DEPRECATED)
    variables = environment_arguments(os.environ, FLAGS, line.values)
    values = {**parse_flags(variables, FLAGS).values, **line.values}
    path = values.get("config_file", "")
    keys = file_arguments(path, FLAGS, values) if path else []
    line = parse_flags([*keys, *variables, *argv], FLAGS, DEPRECATED)
    if line.positional:
        line.values.setdefault("model_repository", []).extend(line.positional)
    return line


def _deprecation_warnings(line: CommandLine) -> list[str]:
    warnings = [
        f"Warning: '--{alias.name}' has been deprecated! {alias.help_text}"
        for alias, _ in line.deprecated
    ]
    values = {alias.name: value for alias, value in line.deprecated}
    if values.get("strict-model-config") is False and "disable-auto-complete-config" in dict(
        line.texts
    ):
        warnings.append(
            "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of"
            " '--disable-auto-complete-config'!"
        )
    return warnings


def _check_given(line: CommandLine) -> None:
    """Checks what depends on the flags that were given, not only on their values."""
    if {"response-cache-byte-size", "cache-config"} <= line.names:
        raise UsageError(
            "Error: Incompatible flags --response-cache-byte-size and --cache-config both"
            " provided. Please provide one or the other."
        )
    if line.values.get("model_config_name") == "":
        raise UsageError("Error: empty argument for --model-config-name")
    repositories = line.values.get("model_repository", [])
    if not repositories:
        raise UsageError("--model-repository must be specified")
    if line.values.get("exit_on_error") is False:
        return  # the server runs without them
    for path in repositories:
        if not is_store_url(path) and not os.path.isdir(path):
            why = f"'{path}' {'is a file' if os.path.exists(path) else 'does not exist'}"
            raise UsageError("repository path is not a valid directory", advice=why)
