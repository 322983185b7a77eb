"""The tables of modules in docs/explanation/tour.md.

`python -m tests.module_table` writes them again, from the docstrings.
"""

from __future__ import annotations

import ast
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "explanation" / "tour.md"
BEGIN, END = "<!-- modules: begin -->\n", "<!-- modules: end -->\n"
PACKAGES = ("pbhost", "host", "stub", "pb_utils")


def summary(module: Path) -> str:
    """The first paragraph of a module's docstring, without its full stop."""
    head = (ast.get_docstring(ast.parse(module.read_text())) or "").split("\n\n")[0]
    return " ".join(head.split()).rstrip(".")


def row(module: Path) -> str:
    """The line of the table for one module."""
    return f"| `{module.relative_to(ROOT)}` | {summary(module)} |"


def tables() -> str:
    """A section for each folder, with a table of its modules."""
    sections = []
    for package in PACKAGES:
        for init in sorted((ROOT / package).rglob("__init__.py")):
            folder = init.parent
            modules = sorted(path for path in folder.glob("*.py") if path != init)
            if modules:
                title = f"### {folder.relative_to(ROOT)}/\n\n{summary(init)}.\n"
                head = "| module | what it is |\n|---|---|"
                sections.append("\n".join([title, head, *map(row, modules)]) + "\n")
    return "\n".join(sections)


def main() -> None:
    """Writes the tables into the page."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    _, _, after = rest.partition(END)
    PAGE.write_text(f"{before}{BEGIN}\n{tables()}\n{END}{after}")


if __name__ == "__main__":
    main()
