"""`pbhost version`: prints the versions of pbhost and of the Triton that it stands for."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

from host.cli.arguments import parse_texts
from host.core import VERSION
from host.release import RELEASE

_ABOUT = "Print the version of pbhost, and the version of Triton that it tells clients."


@dataclass
class _Options:
    """There are no flags."""


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the versions and exits."""
    parse_texts(arguments, "version", _ABOUT, _Options)
    sys.stdout.write(f"pbhost {RELEASE} (as Triton {VERSION})\n")
    sys.exit(0)
