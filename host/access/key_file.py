"""Reads a key file: one line per API key, with its client and what the client may ask."""

from __future__ import annotations

import difflib
import hashlib
import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from pathlib import Path

from host.access.client import Permissions
from host.system.regular_file import read_file

_MIN_LENGTH = 8  # characters of a key
_MAX_FILE_BYTES = 1 << 24
_HASHED = re.compile(r"sha256:([0-9a-fA-F]{64})")
_OPTIONS = ("models", "rate", "burst", "concurrency", "allow")
_OPTION = re.compile(rf"({'|'.join(_OPTIONS)})=(.*)")

DEFAULT_CATEGORIES = frozenset(("metadata", "inference", "model-config", "statistics"))
"""The categories of a client whose line has no `allow`."""


@dataclass(slots=True)
class ClientEntry:
    """A client of a key file: the SHA-256 hashes of its keys, and its permissions."""

    permissions: Permissions
    hashes: list[bytes] = field(default_factory=list)


def read_key_file(
    path: Path, categories: Collection[str], default: frozenset[str] = DEFAULT_CATEGORIES
) -> dict[str, ClientEntry]:
    """Returns the clients of a key file by name. `categories`: the known ones. Blocks.

    Raises OSError, and ValueError with the line of an error.
    """
    if path.stat().st_size > _MAX_FILE_BYTES:
        raise ValueError(f"it has more than {_MAX_FILE_BYTES} bytes")
    clients: dict[str, ClientEntry] = {}
    lines_of_options: dict[str, int] = {}
    owners: dict[bytes, int] = {}
    for number, line in enumerate(read_file(path).decode().splitlines(), 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            name, digest, options = _split_line(words)
            if digest in owners:
                raise ValueError(f"line {owners[digest]} has the same key")
            owners[digest] = number
            name = name or digest.hex()[:8]
            if name not in clients:
                clients[name] = ClientEntry(_read_options({}, categories, default))
            if options:
                first = lines_of_options.setdefault(name, number)
                if first != number:
                    raise ValueError(f"line {first} has the options of client '{name}'")
                clients[name].permissions = _read_options(options, categories, default)
            clients[name].hashes.append(digest)
        except ValueError as error:
            raise ValueError(f"line {number}: {error}") from None
    if not clients:
        raise ValueError("it has no key")
    return clients


def _split_line(words: list[str]) -> tuple[str, bytes, dict[str, str]]:
    """Returns the name, or "", the hash of the key, and the options. Raises ValueError."""
    options: dict[str, str] = {}
    while len(words) > 1 and (option := _OPTION.fullmatch(words[-1])):
        name, value = option.groups()
        if name in options:
            raise ValueError(f"option '{name}' is given twice")
        options[name] = value
        words = words[:-1]
    if len(words) > 2:
        raise ValueError(_unexpected_word(words[2]))
    key = words[-1]
    hashed = _HASHED.fullmatch(key)
    if hashed:
        digest = bytes.fromhex(hashed[1])
    elif key.startswith("sha256:"):
        raise ValueError("a hash is sha256: and 64 hexadecimal digits")
    elif len(key) < _MIN_LENGTH:
        raise ValueError(f"the key has less than {_MIN_LENGTH} characters")
    else:
        digest = hashlib.sha256(key.encode()).digest()
    return words[0] if len(words) == 2 else "", digest, options


def _unexpected_word(word: str) -> str:
    """Returns the error for a word. It may be a key, so that the text has no part of it."""
    close = difflib.get_close_matches(word.partition("=")[0], _OPTIONS, n=1)
    hint = f"; did you mean '{close[0]}=...'?" if close else f". Options are {_list(_OPTIONS)}"
    return f"expected [NAME] KEY [OPTION=VALUE ...]{hint}"


def _read_options(
    options: dict[str, str], categories: Collection[str], default: frozenset[str]
) -> Permissions:
    rate = _number(options, "rate")
    burst = _count(options, "burst") or max(1, math.ceil(rate))
    allowed = default
    if "allow" in options:
        named = options["allow"].split(",")
        allowed = frozenset(categories if named == ["all"] else named)
        for category in sorted(allowed.difference(categories)):
            raise ValueError(
                f"allow: unknown category '{category}'; known are all, {_list(categories)}"
            )
    models = tuple(options["models"].split(",")) if "models" in options else ()
    if "" in models:
        raise ValueError("models: a name is empty")
    return Permissions(allowed, models, rate, burst, _count(options, "concurrency"))


def _number(options: dict[str, str], name: str) -> float:
    if name not in options:
        return 0.0
    try:
        number = float(options[name])
    except ValueError:
        number = math.nan
    if not 0 < number <= 1e9:
        raise ValueError(f"{name} must be a number above 0, got '{options[name]}'")
    return number


def _count(options: dict[str, str], name: str) -> int:
    text = options.get(name, "")
    if name not in options:
        return 0
    if not (text.isascii() and text.isdigit() and 0 < len(text) < 10 and int(text)):
        raise ValueError(f"{name} must be a whole number above 0, got '{text}'")
    return int(text)


def _list(names: Collection[str]) -> str:
    return ", ".join(sorted(names))
