"""MkDocs hooks: link files outside docs/ to the repository, and remove the comments for tests."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"(\]\()([^)\s#]+)(#[^)\s]*)?(\))")
_FOR_TESTS = re.compile(r"^<!-- (?:file|log|needs|not run)\b[^\n]*-->\n", re.MULTILINE)


def on_page_markdown(markdown: str, *, page: Any, config: Any, files: Any) -> str:
    """Rewrites relative links that leave docs/; those within stay, so that MkDocs checks them."""
    folder = posixpath.dirname(posixpath.join("docs", page.file.src_uri))

    def link(found: re.Match[str]) -> str:
        target = found[2]
        if re.match(r"[a-z]+:", target):
            return found[0]
        path = posixpath.normpath(posixpath.join(folder, target))
        if path == "docs" or path.startswith("docs/"):
            return found[0]
        return f"{found[1]}{config.repo_url}/blob/main/{path}{found[3] or ''}{found[4]}"

    return _LINK.sub(link, _FOR_TESTS.sub("", markdown))
