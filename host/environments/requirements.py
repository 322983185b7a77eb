"""Reads the requirements of a model, and the files that they name, by pip's rules."""

from __future__ import annotations

import codecs
import hashlib
import json
import optparse
import os
import re
import shlex
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import unquote, urlsplit

from host.errors import HostError, invalid_argument
from host.system.files import read_file

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


if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = "pyproject.toml"

STUB_REQUIREMENTS = ("numpy>=1.19", "pyzmq>=22", "msgspec>=0.18", "setproctitle>=1.2")
"""The packages that every stub needs, installed in addition."""


@dataclass(frozen=True)
class Requirements:
    """The packages that a model needs.

    `path` is the model's file. `files` has the contents of this file and of the files that it
    includes. `dependencies` and `python` are `dependencies` and `requires-python` of a
    `pyproject.toml`. `remote`: the file includes a URL. The file there may name any file of this
    machine, so the output of pip must not be shown.
    """

    path: Path
    files: dict[str, bytes]
    dependencies: list[str] = field(default_factory=list)
    python: str = ""
    remote: bool = False

    @property
    def key(self) -> str:
        """A hash of the contents and of the host's Python: the name of the environment's folder."""
        parts = [
            sys.implementation.cache_tag,
            sys.version,
            sys.base_prefix,
            sysconfig.get_platform(),
            *STUB_REQUIREMENTS,
            *(f"{name} {hashlib.sha256(data).hexdigest()}" for name, data in self.files.items()),
        ]
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]

    @property
    def arguments(self) -> list[str]:
        """The arguments of `pip install`."""
        file = [] if self.path.name == PYPROJECT else ["--requirement", str(self.path)]
        return [*file, "--", *self.dependencies, *STUB_REQUIREMENTS]


def read_requirements(path: Path, directory: Path) -> Requirements:
    """Reads a requirements file of the model in `directory`.

    Raises HostError INVALID_ARG, also if the file names a file outside of the directory.
    """
    directory = directory.absolute()
    _check_inside(path, path, "it", directory)
    if path.name == PYPROJECT:
        return _read_project(path, directory)
    reader = _RequirementsReader(path.parent, directory)
    reader.read(path)
    return Requirements(path, reader.files, remote=reader.remote)


class _RequirementsReader:
    """Reads a requirements file and the files that it includes, by the rules of pip.

    pip runs in `base`; `directory` is the model's.
    """

    def __init__(self, base: Path, directory: Path) -> None:
        self._base = base
        self._directory = directory
        self.files: dict[str, bytes] = {}
        self.remote = False

    def read(self, path: Path) -> None:
        name = os.path.relpath(path, self._base)
        if name in self.files:
            return
        data = self.files[name] = _read_bytes(path)
        number = 0
        try:
            for number, line in logical_lines(decode_requirements(data)):
                named = named_files(line)
                self.remote = self.remote or named.remote
                for value in named.paths:
                    # pip looks for some of these beside the file, and for others in its folder.
                    for folder in {path.parent, self._base}:
                        self._check(folder / value, path, value, number)
                for value in named.includes:
                    included = path.parent / value
                    self._check(included, path, value, number)
                    self.read(Path(os.path.normpath(included)))
        except InvalidLine as problem:
            place = f"line {number}: " if number else ""
            raise _unusable_error(path, f"{place}{problem}") from None

    def _check(self, named: Path, path: Path, value: str, number: int) -> None:
        _check_inside(named, path, f"line {number} names '{value}', which", self._directory)


def _check_inside(named: Path, path: Path, subject: str, directory: Path) -> None:
    """Raises HostError unless a path stays in the directory, also once links are resolved."""
    written = Path(os.path.normpath(named)).is_relative_to(os.path.normpath(directory))
    resolved = Path(os.path.realpath(named)).is_relative_to(os.path.realpath(directory))
    if not (written and resolved):
        raise _unusable_error(path, f"{subject} is outside of the model's directory {directory}")


def _read_bytes(path: Path) -> bytes:
    try:
        return read_file(path)
    except OSError as error:
        raise invalid_argument(f"cannot read the requirements {path}: {error.strerror}") from error


def _read_project(path: Path, directory: Path) -> Requirements:
    data = _read_bytes(path)
    try:
        project: dict[str, Any] = tomllib.loads(data.decode())["project"]
        listed = project["dependencies"]
        if not isinstance(listed, list) or not all(isinstance(item, str) for item in listed):
            raise _unusable_error(path, "[project] dependencies is not a list of strings")
        for item in listed:
            for value in paths_of_requirement(item):
                subject = f"[project] dependencies names '{value}', which"
                _check_inside(path.parent / value, path, subject, directory)
        return Requirements(
            path, {PYPROJECT: data}, listed, str(project.get("requires-python", ""))
        )
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise _unusable_error(path, str(error)) from error
    except (KeyError, TypeError):
        raise _unusable_error(path, "it has no list 'dependencies' in [project]") from None


def _unusable_error(path: Path, reason: str) -> HostError:
    return invalid_argument(f"cannot use the requirements {path}: {reason}")
