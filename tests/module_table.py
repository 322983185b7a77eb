"""The page docs/explanation/modules.md, from the docstrings of the modules.

`python -m tests.module_table` writes it again.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "modules.md"
HEAD = """\
# Modules of the code

Every module with the first sentence of its docstring, folder by folder; the page is generated from
them. [The tour](tour.md) explains how they work together.
"""
PACKAGES = ("pbhost", "host", "stub", "pb_utils")


def summary(module: Path) -> str:
    """The first paragraph of a module's docstring, without its full stop."""
    head = (ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0]
    return " ".join(head.split()).rstrip(".")


def row(module: Path) -> str:
    """The line of the table for one module."""
    return f"| `{module.relative_to(ROOT)}` | {summary(module)} |"


def page() -> str:
    """The content of the page: a section for each folder, with a table of its modules."""
    sections = [HEAD]
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            folder = init.parent
            modules = sorted(path for path in folder.glob("*.py") if path != init)
            if modules:
                title = f"## {folder.relative_to(ROOT)}/\n\n{summary(init)}.\n"
                head = "| module | what it is |\n|---|---|"
                sections.append("\n".join([title, head, *map(row, modules)]) + "\n")
    return "\n".join(sections)


if __name__ == "__main__":
    PAGE.write_text(page())
