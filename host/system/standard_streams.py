"""The standard streams of a host's process, which whoever starts it may have closed."""

from __future__ import annotations

import os
import sys


def open_standard_streams() -> None:
    """Give each of the three that is closed to the null device, as daemons do.

    Otherwise the files and sockets that are opened next would have their numbers, and be read,
    written to and handed on by whatever takes them for the console. Call this before any is opened.
    """
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:  # so Python tells that it was closed
            null = os.open(os.devnull, os.O_RDWR)
            os.dup2(null, number)
            if null != number:
                os.close(null)
            setattr(sys, name, open(number, "w" if number else "r"))
