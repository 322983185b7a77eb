"""Sizes in bytes as people write them: `8589934592`, `700M`, `8Gi`."""

from __future__ import annotations

import re

MAX_BYTES = 2**63 - 1
_MAX_DIGITS = 40
"""Longer numbers are out of bound, and Python refuses to convert very long ones."""

_SIZE = re.compile(r"([0-9]+)(?:([kKMGT])(i?))?")
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


class SizeOutOfBound(ValueError):
    """The text is a size, but of more than `MAX_BYTES`."""


def read_byte_size(text: str) -> int:
    """Returns the size in bytes: K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises SizeOutOfBound for more than `MAX_BYTES`, ValueError for other texts.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError("a size in bytes is a number, perhaps with K, M, G, T, Ki, Mi, Gi or Ti")
    number, letter, binary = found.groups()
    unit = int((1024 if binary else 1000) ** _POWERS[letter]) if letter else 1
    size = int(number) * unit if len(number) <= _MAX_DIGITS else MAX_BYTES + 1
    if size > MAX_BYTES:
        raise SizeOutOfBound(f"a size in bytes is at most {MAX_BYTES}")
    return size
