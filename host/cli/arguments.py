"""Arguments that `pbhost check`, `config` and `run` have in common."""

from __future__ import annotations

import argparse
from pathlib import Path

from host.errors import invalid_argument
from host.options.options import Options


def make_parser(subcommand: str, about: str, more: str) -> argparse.ArgumentParser:
    """Makes a parser with `--backend-directory`; its help is `about`, the arguments, and `more`.

    A wrong command line ends the process with status 2.
    """
    parser = argparse.ArgumentParser(
        prog=f"pbhost {subcommand}",
        description=about,
        epilog=more,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument_group("as for pbhost serve").add_argument(
        "--backend-directory",
        type=Path,
        default=Path(Options().backend_directory),
        metavar="DIR",
        help="folder of Python-based backends (%(default)s)",
    )
    return parser


def reject_repository(directory: Path) -> None:
    """Raises HostError for a model repository where one model is expected."""
    if _is_model(directory):
        return
    for path in sorted(directory.glob("*/")):
        if _is_model(path):
            raise invalid_argument(
                f"'{directory}' is a folder of models, expected the folder of one: '{path}'"
            )


def _is_model(directory: Path) -> bool:
    """Whether a directory looks like a model; `glob` skips what cannot be read."""
    return any(directory.glob("config.pbtxt")) or any(directory.glob("[1-9]*/"))
