"""Parses the command line of `pbhost serve` into options."""

from __future__ import annotations

import os
from collections.abc import Sequence

from host.options.deprecated_flags import DEPRECATED
from host.options.flag_parser import CommandLine, parse_flags
from host.options.flag_parser import usage as usage_text
from host.options.flag_sources import environment_arguments, file_arguments
from host.options.flags import InvalidValue
from host.options.options import Options, UsageError
from host.options.server_flags import FLAGS
from stub.wire.paths import absolute_path

_SYNOPSIS = "Usage: pbhost serve [options]; `pbhost serve --help` lists them"


def usage() -> str:
    """Returns the text of `--help`."""
    return usage_text("serve", FLAGS, DEPRECATED)


def parse(argv: Sequence[str]) -> Options:
    """Parses the arguments after the program's name.

    Flags that are not there come from environment variables and from the file of `--config-file`.

    Raises UsageError; its text is the error, for `--help` the usage.
    """
    try:
        line = _parse_with_sources(argv)
        _check_given(line)
        options = Options(**line.values)
    except (InvalidValue, UsageError) as error:
        detail = error.detail if isinstance(error, UsageError) else str(error)
        if not detail:
            raise UsageError("", usage()) from None
        raise UsageError(detail, _SYNOPSIS, error.advice) from None
    options.warnings[:0] = _deprecation_warnings(line)
    options.warnings += [
        f"--model-repository: '{path}' contains a config.pbtxt, so it is probably a model"
        f" directory; its repository is '{os.path.dirname(os.path.normpath(absolute_path(path)))}'"
        for path in line.values["model_repository"]
        if os.path.isfile(os.path.join(path, "config.pbtxt"))
    ]
    return options


def _parse_with_sources(argv: Sequence[str]) -> CommandLine:
    line = parse_flags(argv, FLAGS, DEPRECATED)
    variables = environment_arguments(os.environ, FLAGS, line.values)
    values = {**parse_flags(variables, FLAGS).values, **line.values}
    path = values.get("config_file", "")
    keys = file_arguments(path, FLAGS, values) if path else []
    return parse_flags([*keys, *variables, *argv], FLAGS, DEPRECATED)


def _deprecation_warnings(line: CommandLine) -> list[str]:
    warnings = [
        f"Warning: '--{alias.name}' has been deprecated! {alias.help_text}"
        for alias, _ in line.deprecated
    ]
    values = {alias.name: value for alias, value in line.deprecated}
    if values.get("strict-model-config") is False and "disable-auto-complete-config" in line.names:
        warnings.append(
            "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of"
            " '--disable-auto-complete-config'!"
        )
    return warnings


def _check_given(line: CommandLine) -> None:
    """Checks what depends on the flags that were given, not only on their values."""
    if line.positional:
        path = line.positional[0]
        meant = f"did you mean --model-repository={path}?" if os.path.isdir(path) else ""
        raise UsageError(f"Unexpected argument: {path}", advice=meant)
    if {"response-cache-byte-size", "cache-config"} <= set(line.names):
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
        if not os.path.isdir(path):
            why = f"'{path}' {'is a file' if os.path.exists(path) else 'does not exist'}"
            raise UsageError("repository path is not a valid directory", advice=why)
