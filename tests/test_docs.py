"""README.md and docs/: every example is run, every link leads somewhere.

A page is a story (`tests/stories.py`), which begins in an empty folder.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import cache
from pathlib import Path

import pytest

from host.release import RELEASE
from tests import command_reference, module_table, pictures
from tests.conftest import ROOT, Serve
from tests.object_stores import ENVIRONMENT, S3Server
from tests.stories import PART, Story, blocks, needs

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
READMES = [
    *sorted((ROOT / "examples").glob("*/README.md")),
    *sorted((ROOT / "model_repository").rglob("README.md")),
]
LANGUAGES = {"console", "protobuf", "python", "text", "toml"}

_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


_LIBRARY = pytest.mark.test_all(reason="each of its programs imports a large library")
TOLD = [
    pytest.param(page, id=_name(page), marks=[_LIBRARY] if {*needs(page)} - {"moto"} else [])
    for page in PAGES
    if any(block.language != "text" for block in blocks(page))
]


@pytest.mark.parametrize("page", TOLD)
def test_the_examples_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in needs(page):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    with object_store(monkeypatch) if "moto" in needs(page) else nullcontext():
        Story(tmp_path, serve).tell(page)


@contextmanager
def object_store(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """While entered, programs find a server of S3 with the bucket of the page."""
    server = S3Server("shop-models")
    variables = {
        **ENVIRONMENT,
        "AWS_ENDPOINT_URL": server.endpoint,
        "AWS_ALLOW_HTTP": "true",
        "XDG_CACHE_HOME": str(Path.cwd() / "cache"),
    }
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    yield
    server.close()


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_blocks_are_of_a_kind_that_is_looked_after(page: Path) -> None:
    text = page.read_text()
    found = list(blocks(page))
    assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(found), "an odd fence"
    comments = re.findall(r"^<!-- (?:file|log|not run)\b", text, re.MULTILINE)
    assert len(comments) == sum(bool(block.word) for block in found), "a comment without a block"
    for block in found:
        assert block.language in LANGUAGES, block
        assert (block.word in ("file", "not run")) == bool(block.argument), block
        assert block.word != "log" or block.language == "text", block
        assert block.language not in ("protobuf", "toml") or block.word in ("file", "not run"), (
            block
        )
        if block.language == "console":
            assert block.text.startswith("$ "), block


@cache
def _anchors(page: Path) -> set[str]:
    """The fragments under which headings are found."""
    prose = PART.sub("", page.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(prose)
    }


def _wrong_links(page: Path) -> Iterator[str]:
    """The links of a page that lead nowhere."""
    for target in _LINK.findall(PART.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        if not there.exists():
            yield f"{_name(page)}: {target} leads nowhere"
        elif fragment and fragment not in _anchors(there):
            yield f"{_name(page)}: {target}: no such heading"


def test_links_lead_somewhere() -> None:
    assert [wrong for page in [*PAGES, *READMES] for wrong in _wrong_links(page)] == []


def test_names_of_pages_have_hyphens_between_words() -> None:
    names = [page.stem for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []


SOURCES = [
    path
    for folder in (*module_table.PACKAGES, "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
_CITATION = re.compile(r"(docs/[\w/-]+\.md),? ((?:\"[^\"]+\"(?:, and |, | and | to )?)+)?(\d)?")


def _wrong_citations(path: Path) -> Iterator[str]:
    """What is wrong with the citations in the comments of a module."""
    source = path.read_text()
    if "docs/" not in source:
        return
    text = re.sub(r"\s*\n\s*(?:# )?", " ", source)
    for page, headings, digit in _CITATION.findall(text):
        if not (ROOT / page).is_file():
            yield f"{path} cites {page}, which is no file"
            continue
        if digit:
            yield f"{path} cites {page} by a number"
        titles = [
            re.sub(r"^[\d.]+b? |`", "", title)
            for title in _HEADING.findall((ROOT / page).read_text())
        ]
        for name in re.findall(r'"([^"]+)"', headings):
            if not any(name in (title, title.partition(" (")[0]) for title in titles):
                yield f"{path}: {page} has no heading {name}"


def test_comments_cite_headings_that_exist_by_their_names() -> None:
    assert [wrong for path in SOURCES for wrong in _wrong_citations(path)] == []


def test_the_changelog_dates_the_current_release() -> None:
    versions = re.findall(
        r"^## (\S+)(?: - (\S+))?$", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE
    )
    (unreleased, _), (version, date), *_ = versions
    assert (unreleased, version) == ("Unreleased", RELEASE)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", date)


def _definitions() -> tuple[set[str], dict[str, set[str]]]:
    """Returns the names that the code defines, and those of the members of each class."""
    names: set[str] = set()
    members: dict[str, set[str]] = {}
    for folder in module_table.PACKAGES:
        for path in (ROOT / folder).rglob("*.py"):
            names.update(path.relative_to(ROOT).with_suffix("").parts)
            for node in ast.walk(ast.parse(path.read_text())):
                names.update(_defined_names(node))
                if isinstance(node, ast.ClassDef):
                    for inner in ast.walk(node):
                        members.setdefault(node.name, set()).update(_defined_names(inner))
    return names, members


def _defined_names(node: ast.AST) -> Iterator[str]:
    match node:
        case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
            yield node.name
        case ast.Name(ctx=ast.Store()):
            yield node.id
        case ast.Attribute(ctx=ast.Store()) | ast.arg():
            yield node.attr if isinstance(node, ast.Attribute) else node.arg


def test_the_tour_names_what_exists() -> None:
    tour = (ROOT / "docs" / "explanation" / "tour.md").read_text()
    text = re.sub(r"```.*?```", "", tour.split("\n## Directories\n")[0], flags=re.DOTALL)
    names, members = _definitions()
    shown = set(re.findall(r"`([A-Za-z_][\w./]*)`", text))
    paths = {name for name in shown if "/" in name}
    assert [path for path in paths if not (ROOT / path).exists()] == []
    for name in shown - paths:
        *owner, last = name.split(".")
        known = members[owner[-1]] if owner and owner[-1] in members else names
        assert last in known, f"the code has no {name}"
        assert names.issuperset(owner), f"the code has no {name}"


def test_the_command_reference_has_the_texts_of_help() -> None:
    current = command_reference.PAGE.read_text()
    assert command_reference.page() == current, "python -m tests.command_reference"


def test_the_page_of_modules_has_their_summaries() -> None:
    assert module_table.page() == module_table.PAGE.read_text(), "python -m tests.module_table"


def test_diagrams_are_drawn_from_their_texts() -> None:
    assert pictures.DIAGRAMS
    for path in pictures.DIAGRAMS:
        drawn = path.with_suffix(".svg").read_text()
        assert pictures.diagram(path.read_text()) == drawn, "make pictures"


def test_screenshots_show_the_pages_as_they_are() -> None:
    current = {name: pictures.sources(name) for name in pictures.SCREENSHOTS}
    assert pictures.taken() == current, "make pictures (needs Chromium)"
    assert all((pictures.FOLDER / f"{name}.png").is_file() for name in current)
