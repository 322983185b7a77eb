"""The command line of `pbhost serve`, read as options."""

from __future__ import annotations

import os
from collections.abc import Sequence

from host.deprecated_flags import DEPRECATED
from host.flags import BadValue, CommandLine, collect
from host.flags import usage as usage_text
from host.options import FLAGS, Options, UsageError


def usage() -> str:
    """The text of `--help`."""
    return usage_text("pbhost serve", FLAGS, DEPRECATED)


def parse(argv: Sequence[str]) -> Options:
    """The options of a command line (without the program's name).

    Raises UsageError, whose text is the usage followed by what is wrong (nothing for `--help`).
    """
    try:
        line = collect(argv, FLAGS, DEPRECATED)
        _check_given(line)
        options = Options(**line.values)
    except (BadValue, UsageError) as error:
        raise UsageError(str(error), usage()) from None
    options.warnings[:0] = [
        f"'--{alias.name}' has been deprecated! {alias.help}" for alias in line.deprecated
    ]
    return options


def _check_given(line: CommandLine) -> None:
    """What can be seen only on a command line."""
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
    if not all(os.path.isdir(path) for path in repositories):
        raise UsageError("repository path is not a valid directory")
