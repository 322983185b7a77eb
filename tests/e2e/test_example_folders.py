"""Examples that are a folder with a test of their own, by the commands of their READMEs."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.conftest import ROOT, Serve
from tests.stories import blocks, needs, tell_example

ELSEWHERE = "tensorrt_plan", "with_requirements"  # tests/gpu and test_examples.py run them
EXAMPLES = sorted({path.parent for path in (ROOT / "examples").glob("*/test_*.py")})
_LIBRARY = [
    pytest.mark.test_all(reason="each of its programs imports a large library"),
    pytest.mark.timeout(900),
]


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(folder, id=folder.name, marks=_LIBRARY if needs(folder / "README.md") else [])
        for folder in EXAMPLES
        if folder.name not in ELSEWHERE
    ],
)
def test_the_readme_of_an_example_does_what_it_says(
    example: Path, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    tell_example(example, tmp_path, serve)


def test_a_lesson_writes_the_files_of_its_example() -> None:
    lesson = ROOT / "docs" / "tutorial" / "scikit-learn.md"
    written = {block.argument: block.text for block in blocks(lesson) if block.word == "file"}
    folder = ROOT / "examples" / "scikit_learn"
    assert written == {name: (folder / name).read_text() for name in written}


def test_the_page_of_examples_has_every_folder() -> None:
    page = (ROOT / "docs" / "examples.md").read_text()
    shown = set(re.findall(r"\]\(\.\./examples/(\w+)(?:/README\.md)?\)", page))
    folders = {path.name for path in (ROOT / "examples").iterdir() if path.is_dir()}
    assert shown == folders - {"__pycache__"}
