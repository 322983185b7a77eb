"""The tests that docs/reference/compatibility.md names as its witnesses."""

from __future__ import annotations

import re

import pytest

from tests.conftest import ROOT

PAGE = ROOT / "docs" / "reference" / "compatibility.md"
NAMED = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text())


@pytest.mark.parametrize(("file", "name"), NAMED)
def test_a_test_that_the_page_names_is_there(file: str, name: str) -> None:
    found = [path.read_text() for path in (ROOT / "tests").rglob(file)]
    assert any(re.search(rf"^(async )?def {name}\(", text, re.MULTILINE) for text in found)


def test_the_page_names_some() -> None:
    assert NAMED
