"""The standard streams of a host's process, which its parent may have closed."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Opens the null device for each standard stream that is closed, as daemons do.

    Otherwise the next files and sockets would get these numbers and be taken for the console. Call
    this before any other file is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # Python sets it to None if it was closed
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r"))
