"""The tables of fields in the guide: they list every field that the code knows, and no other."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from host.frontends.openai.fields import (
    CHAT,
    COMPLETIONS,
    EMBEDDINGS,
    IMAGES,
    KNOWN_FIELDS,
    SPEECH,
    TRANSCRIPTIONS,
)
from host.frontends.openai.inputs import SCHEDULING_FIELDS
from host.frontends.openai.response_fields import KNOWN_RESPONSE_FIELDS

DOCS = Path(__file__).parents[5] / "docs"
PAGES = (DOCS / "reference" / "openai.md", DOCS / "how-to" / "openai-media.md")
OLD = {"functions", "function_call"}
TABLES = {
    "Of chats and completions:": KNOWN_FIELDS[CHAT] | KNOWN_FIELDS[COMPLETIONS],
    "Of embeddings:": KNOWN_FIELDS[EMBEDDINGS] - OLD,
    "## Responses": KNOWN_RESPONSE_FIELDS,
    "## Transcriptions": KNOWN_FIELDS[TRANSCRIPTIONS] - OLD,
    "## Images": KNOWN_FIELDS[IMAGES] - OLD,
    "## Speech": KNOWN_FIELDS[SPEECH] - OLD,
}


def listed(heading: str) -> list[str]:
    """The fields of the first column of the table of fields after a heading."""
    guide = "\n".join(page.read_text() for page in PAGES)
    text = guide.split(f"\n{heading}\n", 1)[1]
    rows = text.split("\n| field | |\n|---|---|\n", 1)[1].split("\n\n", 1)[0].splitlines()
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|")[1])]


@pytest.mark.parametrize("heading", TABLES)
def test_the_guide_lists_every_field(heading: str) -> None:
    assert set(listed(heading)) == TABLES[heading] | set(SCHEDULING_FIELDS)
