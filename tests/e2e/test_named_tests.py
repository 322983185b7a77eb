"""Tests that are named elsewhere: in docs/reference/compatibility.md, and as exceptions on Ray."""

from __future__ import annotations

import re
from collections.abc import Iterable

from tests.conftest import ROOT
from tests.ray.exceptions import EXCEPTIONS, MODEL_APPS_EXCEPTIONS

PAGE = ROOT / "docs" / "reference" / "compatibility.md"


def missing(named: Iterable[tuple[str, str]], folder: str) -> list[str]:
    """The named tests, each with its file, that a folder does not have."""
    defined = {
        (path.name, name)
        for path in (ROOT / folder).rglob("test_*.py")
        for name in re.findall(r"^(?:async )?def (test_\w+)\(", path.read_text(), re.MULTILINE)
    }
    return [f"{file}::{name}" for file, name in named if (file, name) not in defined]


def test_the_tests_that_the_page_names_are_there() -> None:
    named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", PAGE.read_text())
    assert named
    assert missing(named, "tests") == []


def test_exceptions_on_ray_name_tests() -> None:
    exceptions = [*EXCEPTIONS, *MODEL_APPS_EXCEPTIONS]
    named = [tuple(test.partition("[")[0].split("::")) for test in exceptions]
    assert missing(((file, name) for file, name in named), "tests/integration") == []
