"""The list of the files that a model has imported."""

from __future__ import annotations

from pathlib import Path

from stub.imports import list_imported_files

RAISES = """
try:
    1 / 0
except ZeroDivisionError as error:
    raise error from error
"""


def test_the_files_of_an_error_that_is_its_own_cause_are_listed(tmp_path: Path) -> None:
    file = str(tmp_path / "model.py")
    try:
        exec(compile(RAISES, file, "exec"))
    except ZeroDivisionError as error:
        assert file in [path for path, *_ in list_imported_files(0, error)]
