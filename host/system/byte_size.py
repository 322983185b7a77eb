"""Sizes in bytes as people write them: `8589934592`, `700M`, `8Gi`."""

from __future__ import annotations

import re

_SIZE = re.compile(r"([0-9]{1,18})(?:([kKMGT])(i?))?")
_POWERS = {"k": 1, "K": 1, "M": 2, "G": 3, "T": 4}


def read_byte_size(text: str) -> int:
    """Returns the size in bytes: K, M, G and T are powers of 1000, Ki, Mi, Gi and Ti of 1024.

    Raises ValueError for other texts.
    """
    found = _SIZE.fullmatch(text)
    if found is None:
        raise ValueError(f"a size in bytes is a number, perhaps with K, M, G, Ki, Mi, Gi: {text}")
    number, letter, binary = found.groups()
    if not letter:
        return int(number)
    return int(number) * int((1024 if binary else 1000) ** _POWERS[letter])
