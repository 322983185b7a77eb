"""The classes that docs/how-to/embedding.md shows, for the tests that run them."""

from __future__ import annotations

from typing import Any

from tests.conftest import ROOT
from tests.stories import blocks


def class_of_page(file: str, name: str) -> Any:
    """A class in the block that the page saves as this file."""
    (block,) = (
        one for one in blocks(ROOT / "docs" / "how-to" / "embedding.md") if one.argument == file
    )
    namespace: dict[str, Any] = {}
    exec(compile(block.text, file, "exec"), namespace)
    return namespace[name]
