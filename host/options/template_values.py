"""Reads the values of template variables: `--set` and `--set-file`."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from host.config.template import parse_assignment, parse_assignments
from host.options.flags import InvalidValue
from host.system.regular_file import read_file


def read_assignments(texts: Sequence[str]) -> dict[str, str]:
    """The values of `--set`. Raises InvalidValue."""
    try:
        return dict(map(parse_assignment, texts))
    except ValueError as error:
        raise InvalidValue(str(error)) from None


def read_files(paths: Sequence[str]) -> dict[str, str]:
    """The values in the files of `--set-file`. Reads files. Raises InvalidValue."""
    found: dict[str, str] = {}
    for path in paths:
        try:
            found.update(parse_assignments(read_file(Path(path)).decode("utf-8-sig").splitlines()))
        except OSError as error:
            raise InvalidValue(f"cannot read '{path}': {error.strerror}") from None
        except ValueError as error:  # also for bytes that are not UTF-8
            raise InvalidValue(f"{path}: {error}") from None
    return found


def read_variables(assignments: Sequence[str], paths: Sequence[str]) -> dict[str, str] | None:
    """All values of template variables; None without `--set` and `--set-file`.

    Reads files. Raises InvalidValue.
    """
    if not assignments and not paths:
        return None
    return {**read_files(paths), **read_assignments(assignments)}
