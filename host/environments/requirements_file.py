"""Reads requirements files by pip's rules, and finds the files that they name."""

from __future__ import annotations

import codecs
import optparse
import os
import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

# https://pip.pypa.io/en/stable/reference/requirements-file-format/
_LISTS = ("-i --index-url --pypi-url", "--extra-index-url", "-f --find-links", "-e --editable")
_INCLUDES = ("-r --requirement", "-c --constraint")
_VALUES = (
    "--no-binary",
    "--only-binary",
    "--trusted-host",
    "--use-feature",
    "--global-option",
    "--install-option",
    "--hash",
    "-C --config-settings --config-setting",
)
_SWITCHES = ("--no-index", "--prefer-binary", "--require-hashes", "--pre")

_COMMENT = re.compile(r"(^|\s+)#.*$")
_VARIABLE = re.compile(r"\$\{([A-Z0-9_]+)\}")
_SCHEME = re.compile(r"(?i)[a-z][a-z0-9+.-]*:")
_FILE_URL = re.compile(r"(?i)(?:[a-z0-9.-]+\+)?file:\S*")
_EXTRAS = re.compile(r"\[[^\[\]]*\]$")
_ARCHIVES = (".whl", ".zip", ".tar", ".tgz", ".tbz", ".gz", ".bz2", ".xz", ".lzma", ".tlz", ".txz")
_CODING = re.compile(r"^[ \t\f]*#.*?coding[:=][ \t]*([-\w.]+)")


class InvalidLine(Exception):
    """A line cannot be read by pip's rules, or by those of this module."""


@dataclass
class NamedFiles:
    """What one line names: files to include, local paths, and whether it includes a URL."""

    includes: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    remote: bool = False


class _Parser(optparse.OptionParser):
    """Reads options as pip does, abbreviations included."""

    def error(self, msg: str) -> NoReturn:
        raise InvalidLine(msg)


def _option_parser() -> _Parser:
    parser = _Parser(add_help_option=False)
    for names, destination in [
        *((names, "paths") for names in _LISTS),
        *((names, "includes") for names in _INCLUDES),
        *((names, "others") for names in _VALUES),
    ]:
        parser.add_option(*names.split(), dest=destination, action="append", default=[])
    for name in _SWITCHES:
        parser.add_option(name, dest="switch", action="store_true")
    return parser


def decode_requirements(data: bytes) -> str:
    """Decodes a requirements file.

    pip also reads other encodings than UTF-8. They are refused, so that pip cannot read a file
    differently than this module. Raises InvalidLine.
    """
    text = data.removeprefix(codecs.BOM_UTF8)
    for line in text.split(b"\n")[:2]:
        declared = _CODING.match(line.decode("latin-1"))
        if declared and declared[1].lower().replace("_", "-") not in ("utf-8", "utf8", "ascii"):
            raise InvalidLine(f"its encoding is '{declared[1]}', expected UTF-8")
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        line_number = text.count(b"\n", 0, error.start) + 1
        raise InvalidLine(f"line {line_number} is not valid UTF-8") from None


def logical_lines(text: str) -> Iterator[tuple[int, str]]:
    """Yields the number and the content of each line, without comments, with variables replaced.

    A backslash joins a line to the next one.
    """
    first, parts = 0, list[str]()
    for number, line in enumerate(text.splitlines(), 1):
        first = first if parts else number
        comment = _COMMENT.match(line) is not None
        if line.endswith("\\") and not comment:
            parts.append(line.strip("\\"))
            continue
        yield first, _finished("".join([*parts, f" {line}" if comment else line]))
        parts.clear()
    if parts:
        yield first, _finished("".join(parts))


def _finished(line: str) -> str:
    return _VARIABLE.sub(
        lambda name: os.environ.get(name[1]) or name[0], _COMMENT.sub("", line).strip()
    )


def named_files(line: str) -> NamedFiles:
    """Finds the files that a logical line of a requirements file names. Raises InvalidLine."""
    words = line.split(" ")
    count = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    try:
        options: Any = _option_parser().parse_args(shlex.split(" ".join(words[count:])))[0]
    except ValueError as error:  # a quote that is not closed
        raise InvalidLine(str(error)) from None
    found = NamedFiles()
    for value in options.includes:
        path = _local_path(value)
        if path is None:
            found.remote = True
        else:
            found.includes.append(path)
    for value in options.paths:
        path = _local_path(value)
        if path is not None:
            found.paths.append(path)
    found.paths += paths_of_requirement(" ".join(words[:count]))
    return found


def paths_of_requirement(text: str) -> list[str]:
    """The local paths of a requirement such as `name>=1`, `./folder` or `name @ file:///path`."""
    url = _FILE_URL.search(text)
    if url is not None:
        return [_path_of_url(url[0])]
    target = text.partition("@")[2].strip() if re.match(r"[\w.\[\], -]+@", text) else text
    target = target.partition(";")[0].strip()
    if _SCHEME.match(target):
        return []
    bare = _EXTRAS.sub("", target)
    local = "/" in bare or bare.startswith(".") or bare.lower().endswith(_ARCHIVES)
    return [bare] if local else []


def _local_path(value: str) -> str | None:
    """The path that the value of an option names, None for a URL of another machine."""
    if _FILE_URL.match(value):
        return _path_of_url(value)
    return None if _SCHEME.match(value) else _EXTRAS.sub("", value)


def _path_of_url(url: str) -> str:
    """The path of a `file:` URL. One with a host is returned whole, as an absolute path."""
    parts = urlsplit(url.partition("+")[2] if "+" in url.partition(":")[0] else url)
    path = unquote(parts.path)
    if parts.netloc not in ("", "localhost"):
        return f"//{parts.netloc}{path}"
    return path.partition("@")[0] if "+" in url.partition(":")[0] else path
