"""Tests that are named elsewhere: in docs/reference/compatibility.md, and as exceptions on Ray."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT
from tests.ray.exceptions import EXCEPTIONS, MODEL_APPS_EXCEPTIONS

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text())


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    found = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert any(re.search(rf"^(async )?def {name}\(", text, re.MULTILINE) for text in found)


@pytest.mark.parametrize("test", [*EXCEPTIONS, *MODEL_APPS_EXCEPTIONS])
def test_an_exception_on_ray_names_a_test(test: str) -> None:
    file, _, name = test.partition("::")
    source = (ROOT / "tests" / "integration" / file).read_text()
    assert re.search(rf"^(async )?def {name.partition('[')[0]}\(", source, re.MULTILINE)


def test_the_page_names_some() -> None:
    assert NAMED
