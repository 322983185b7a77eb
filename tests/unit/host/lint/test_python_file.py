"""A model's Python file is compiled and not run."""

from __future__ import annotations

from pathlib import Path

import pytest

from host.config.source import Position
from host.lint.python_file import PythonFile

EXECUTE = "    def execute(self, requests): pass\n"
COMPLETE = "    @staticmethod\n    def auto_complete_config(config): return config\n"


def look(folder: Path, source: str | bytes) -> PythonFile:
    path = folder / "model.py"
    path.write_bytes(source if isinstance(source, bytes) else source.encode())
    return PythonFile(path)


@pytest.mark.parametrize(
    ("source", "position", "text"),
    [
        ("def f(:\n", (1, 7), "SyntaxError: invalid syntax"),
        ("x = 1\n  y = 2\n", (2, 2), "IndentationError: unexpected indent"),
        ("\n\nreturn 5\n", (3, 1), "SyntaxError: 'return' outside function"),
        ("x = 1\n", None, "it has no class TritonPythonModel"),
    ],
    ids=["syntax", "indent", "return", "class"],
)
def test_a_problem_is_reported_with_its_position(
    tmp_path: Path, source: str, position: Position | None, text: str
) -> None:
    (problem,) = look(tmp_path, source).problems
    assert (problem.position, problem.text, problem.warning) == (position, text, False)


def test_a_model_that_can_answer_no_request_is_warned_of(tmp_path: Path) -> None:
    (problem,) = look(
        tmp_path, "import a\nclass TritonPythonModel:\n    def execut(self, requests): ...\n"
    ).problems
    assert problem.format_line.endswith(
        "model.py:2:1: warning: TritonPythonModel has no method execute (every request will fail)"
    )
    for more in ("execute = run", "from m import execute", "setattr(self, 'execute', run)"):
        assert not look(tmp_path, f"class TritonPythonModel:\n    {more}\n").problems


@pytest.mark.parametrize(
    "source",
    [b"x = '\xff'\n", b"x = 1\0\n", b"(" * 5000, b"-" * 100_000 + b"1", b"# coding: what\n"],
    ids=["not UTF-8", "NUL", "brackets", "signs", "encoding"],
)
def test_a_file_that_cannot_be_compiled_is_a_problem_and_not_a_crash(
    tmp_path: Path, source: bytes
) -> None:
    file = look(tmp_path, source)
    assert len(file.problems) == 1
    assert file.may_complete


def test_the_code_does_not_run(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    assert not look(
        tmp_path, f"open({str(trace)!r}, 'w')\nclass TritonPythonModel:\n{EXECUTE}"
    ).problems
    assert not trace.exists()


@pytest.mark.parametrize(
    ("source", "may_complete"),
    [
        (f"class TritonPythonModel:\n{EXECUTE}", False),
        (f"class TritonPythonModel:\n{EXECUTE}{COMPLETE}", True),
        (f"class TritonPythonModel(Base):\n{EXECUTE}", True),
        (f"@wrapped\nclass TritonPythonModel:\n{EXECUTE}", True),
        ("from other import Model as TritonPythonModel\n", True),
        ("from other import *\n", True),
        ("TritonPythonModel = make()\n", True),
        ("globals()['TritonPythonModel'] = make()\n", True),
        ("if FAST:\n    TritonPythonModel = make()\nelse:\n    class TritonPythonModel: 1", True),
    ],
    ids=[
        "plain", "completing", "derived", "decorated", "imported", "star", "assigned", "dynamic",
        "twice",
    ],
)  # fmt: skip
def test_a_class_that_is_not_defined_plainly_may_complete_its_configuration(
    tmp_path: Path, source: str, may_complete: bool
) -> None:
    file = look(tmp_path, source)
    assert file.problems == []
    assert file.may_complete is may_complete
