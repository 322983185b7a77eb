"""`pbhost new`: writes the folder of a new project: a model, its configuration, tests, a client."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from host.cli.arguments import fail, parse_texts
from host.options.flags import FlagGroup, InvalidValue, one_of

_TEMPLATES = Path(__file__).with_name("templates")
_SUFFIX = ".template"  # of text files, in which the name of the model replaces the placeholder
_PLACEHOLDER = "__MODEL__"

_MODEL_NAMES = {
    "plain": "double",
    "batched": "normalise",
    "decoupled": "words",
    "bls": "pipeline",
    "image": "colours",
    "onnx": "double",
    "chat": "parrot",
}
"""The name of the model by kind, unless the user gives another one."""

_ABOUT = """\
Writes a new folder with a model repository, tests of the model, a client, and a README with the
commands to check, test, run and serve it. A folder that exists is not changed.

kinds:
  plain      a model that computes one response for each request
  batched    the server joins requests, and the model computes them together
  decoupled  a model that sends any number of responses to a request
  bls        a model that sends requests to another model
  image      a model that gets the content of picture files; it needs pillow
  onnx       a file of ONNX, without Python code; it needs pbhost[onnx]
  chat       a model for clients of OpenAI, which streams its answer

examples:
  pbhost new project
  pbhost new project --kind=chat --model=assistant

exit status: 0 the folder is written; 1 it exists, or cannot be written; 2 the command line is
invalid"""

_group = FlagGroup("New")


def _check_model(name: Any) -> None:
    if name and not re.fullmatch(r"[A-Za-z][A-Za-z0-9_-]*", name):
        raise InvalidValue(f"expected letters, digits, '_' and '-', got '{name}'")


@dataclass
class NewOptions:
    """The flags of `pbhost new`."""

    kind: str = _group(
        "plain", f"One of {', '.join(_MODEL_NAMES)}.", check=one_of("kind", *_MODEL_NAMES)
    )
    model: str = _group("", "Name of the model; by default, it depends on the kind.",
                        check=_check_model)  # fmt: skip


def main(arguments: Sequence[str]) -> NoReturn:
    """Writes the folder, prints what to do next, and exits."""
    (place,), options = parse_texts(arguments, "new DIR", _ABOUT, NewOptions)
    directory = Path(place)
    model = options.model or _MODEL_NAMES[options.kind]
    try:
        directory.mkdir(parents=True)
        written = [
            _write(source, directory, options.kind, model) for source in _files(options.kind)
        ]
    except FileExistsError:
        fail("new", f"'{directory}' exists already")
    except OSError as error:
        fail("new", f"cannot write '{directory}': {error.strerror}")
    lines = [*map(str, sorted(written)), "", f"Next: cd {directory}, and read README.md"]
    sys.stdout.write("\n".join(lines) + "\n")
    sys.exit(0)


def _files(kind: str) -> Iterator[Path]:
    return (path for path in sorted((_TEMPLATES / kind).rglob("*")) if path.is_file())


def _write(source: Path, directory: Path, kind: str, model: str) -> Path:
    """Writes one file of the kind, and returns its path. Raises OSError."""
    relative = str(source.relative_to(_TEMPLATES / kind)).replace(_PLACEHOLDER, model)
    path = directory / relative.removesuffix(_SUFFIX)
    path.parent.mkdir(parents=True, exist_ok=True)
    if relative.endswith(_SUFFIX):
        text = source.read_text(encoding="utf-8").replace(_PLACEHOLDER, model)
        path.write_text(text, encoding="utf-8")
    else:
        path.write_bytes(source.read_bytes())
    return path
