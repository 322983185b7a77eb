"""Arguments that `pbhost check`, `pbhost config` and `pbhost run` share."""

from __future__ import annotations

import argparse
from pathlib import Path

from host.errors import invalid_argument
from host.options.options import Options


def make_parser(subcommand: str, about: str, more: str) -> argparse.ArgumentParser:
    """Creates a parser with `--backend-directory`; `about` and `more` are in its help.

    An invalid command line ends the process with status 2.
    """
    parser = argparse.ArgumentParser(
        prog=f"pbhost {subcommand}",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument_group("as in pbhost serve").add_argument(
        "--backend-directory",
        type=Path,
        default=Path(Options().backend_directory),
        metavar="DIR",
        help="directory of Python-based backends (%(default)s)",
    )
    return parser


def reject_repository(directory: Path) -> None:
    """Raises HostError if the directory is a model repository instead of a model."""
    if _is_model(directory):
        return
    for path in sorted(directory.glob("*/")):
        if _is_model(path):
            raise invalid_argument(
                f"'{directory}' is a model repository, expected a model directory: '{path}'"
            )


def _is_model(directory: Path) -> bool:
    """Whether a directory looks like a model; `glob` skips unreadable directories."""
    return any(directory.glob("config.pbtxt")) or any(directory.glob("[1-9]*/"))
