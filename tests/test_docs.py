"""README.md and docs/: every example is run, every link leads somewhere.

A page is a story. Its examples are worked through from top to bottom in an empty folder, which what
they print calls /srv:

* `<!-- file: PATH -->` above a block saves it as PATH.
* A `python` block without that comment is run as a script.
* In a `console` block, a line that begins with `$ ` is run, and must print what stands below it, if
  anything does. `$ pbhost serve ...` starts a host, which serves until the next one starts.
* `<!-- log -->` above a `text` block: the host that runs now writes these lines to its log. Here
  and below `pbhost serve`, what lines of `...` separate may come in any order.
* `<!-- needs: MODULE -->`: the page is skipped where this module is not installed.
* Any other `text` block is an illustration, and `<!-- not run: REASON -->` makes one of any block.

`...` stands for any text, and on a line of its own for any lines. Clients find the host although
they are told `localhost:8001`, `localhost:8000` for HTTP, or `localhost:8002` for metrics, and
commands if they are told no address. What
differs from run to run (times, process ids, ports, folders) is not compared.
"""

from __future__ import annotations

import ast
import os
import re
import shlex
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from host.release import RELEASE
from tests import command_reference, module_table, pictures
from tests.conftest import DEADLINE, ROOT, RunningHost, Serve, wait_until

PAGES = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
LANGUAGES = {"console", "protobuf", "python", "text", "toml"}
SERVE = "pbhost serve "
HERE = "/srv"
"""The name of the folder in printed output."""

_PART = re.compile(
    r"^(?:<!-- (?P<word>file|log|not run)(?:: (?P<argument>[^\n]+?))? -->\n+)?"
    r"```(?P<language>\w*)\n(?P<text>.*?)^```$",
    re.MULTILINE | re.DOTALL,
)
_NEEDS = re.compile(r"^<!-- needs: (\w+) -->$", re.MULTILINE)
_LOG_HEAD = re.compile(r"^([IWE])\d{4} \d\d:\d\d:\d\d\.\d{6} \d+ (\w+\.py):\d+\]", re.MULTILINE)
_WITHOUT_URL = re.compile(
    r"(?:^|\| )pbhost (?:infer|models|wait|chat|top) (?!\w+://)", re.MULTILINE
)
_LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
_HEADING = re.compile(r"^#+ (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Block:
    """A fenced block, with the word and the argument of the comment above it."""

    language: str
    text: str
    word: str
    argument: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text()
    for found in _PART.finditer(text):
        line = text.count("\n", 0, found.start("language")) + 1
        word, argument = found["word"] or "", found["argument"] or ""
        yield Block(found["language"], found["text"], word, argument, line)


def comparable(text: str) -> str:
    """The text without what differs from run to run."""
    text = _LOG_HEAD.sub(r"\1 \2]", text)
    text = re.sub(r"(127\.0\.0\.1|0\.0\.0\.0|localhost):\d+", "HOST", text)
    text = re.sub(r"^\d\d:\d\d:\d\d (?=[A-Z]+ )", "", text, flags=re.MULTILINE)
    text = re.sub(r"in \d+\.\d+( ?m?s)\b", r"in N\1", text)
    return "".join(f"{line.rstrip()}\n" for line in text.strip("\n").split("\n"))


def pattern(expected: str) -> re.Pattern[str]:
    """The pattern that matches the expected text."""
    lines = comparable(expected).splitlines()
    return re.compile(
        "".join(
            r"(?:.*\n)*?" if line == "..." else re.escape(line).replace(r"\.\.\.", ".*") + r"\n"
            for line in lines
        )
    )


def steps(console: str) -> Iterator[tuple[str, str]]:
    """The commands of a console block, each with its expected output."""
    for part in re.split(r"^\$ ", console, flags=re.MULTILINE)[1:]:
        command, _, expected = part.partition("\n")
        yield command, expected.strip("\n")


def with_ports(host: RunningHost, text: str) -> str:
    """The text with the ports of a host instead of the usual ones."""
    text = _WITHOUT_URL.sub(r"\g<0>http://localhost:8000 ", text)
    text = text.replace("localhost:8001", host.url)
    if "localhost:8000" in text:
        text = text.replace("localhost:8000", host.http_url)
    if "localhost:8002" in text:
        text = text.replace("localhost:8002", host.metrics_url)
    return text


class Story:
    """One page, worked through in one folder."""

    def __init__(self, folder: Path, serve: Serve) -> None:
        self.folder = folder
        self.host: RunningHost | None = None
        self._serve = serve
        self._scripts: dict[str, str] = {}

    def tell(self, block: Block) -> None:
        """Does what the block says."""
        if block.word == "not run":
            return
        if block.word == "log":
            self._await_log(block.text)
        elif block.word == "file":
            self._save(block.argument, block.text)
        elif block.language == "python":
            name = f"block_{block.line}.py"
            self._save(name, block.text)
            self._run(f"python {name}", "")
        elif block.language == "console":
            for command, expected in steps(block.text):
                if command.startswith(SERVE):
                    self._start(command, expected)
                else:
                    self._run(command, expected)

    def _save(self, name: str, text: str) -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
        self._scripts[name] = text

    def _as_printed(self, text: str) -> str:
        return text.replace(str(self.folder), HERE)

    def _start(self, command: str, expected: str) -> None:
        if self.host is not None:
            self.host.stop()
        flags = shlex.split(command)[2:]
        named = "--model-repository="
        (repository,) = (f for f in flags if f.startswith(named) or not f.startswith("-"))
        flags.remove(repository)
        env = {"TRITON_SERVER_ESCAPE_LOG_MESSAGES": "1"}
        host = self.host = self._serve(Path(repository.removeprefix(named)), *flags, env=env)
        wait_until(
            lambda: (
                "Started GRPCInferenceService" in host.output or host.process.poll() is not None
            ),
            f"an end of the start of {command}",
        )
        if host.process.poll() is None:
            host.wait_started()
        if expected:
            self._await_log(expected)

    def _await_log(self, expected: str) -> None:
        host = self.host
        assert host is not None, "no host runs"
        parts = re.split(r"^\.\.\.\n", expected + "\n", flags=re.M)
        # Lines of the host itself may come between the lines that a model prints.
        wanted = [pattern(re.sub(r"\n(?=.)", "\n...\n", part)) for part in parts]
        end = time.monotonic() + DEADLINE
        while True:
            over = host.process.poll() is not None or time.monotonic() > end
            log = comparable(self._as_printed(host.output))
            missing = [part.pattern for part in wanted if not part.search(log)]
            if not missing:
                return
            assert not over, f"the log lacks {missing}:\n{log}"
            threading.Event().wait(0.01)

    def _run(self, command: str, expected: str) -> None:
        if self.host is not None:
            command = with_ports(self.host, command)
            for name, text in self._scripts.items():
                (self.folder / name).write_text(with_ports(self.host, text))
        binaries = os.path.dirname(sys.executable)
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env={
                **os.environ,
                "PATH": f"{binaries}:{os.environ['PATH']}",
                "COLUMNS": "80",
                "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",  # examples need none, and start sooner
            },
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=DEADLINE,
        )
        printed = comparable(self._as_printed(done.stdout))
        if expected:
            wanted = pattern(expected)
            assert wanted.fullmatch(printed), f"$ {command}\n{printed}\nand not\n{expected}"
        else:
            assert done.returncode == 0, f"$ {command}\n{printed}"


def _name(page: Path) -> str:
    return str(page.relative_to(ROOT))


_LIBRARY = pytest.mark.test_all(reason="each of its programs imports a large library")
TOLD = [
    pytest.param(page, id=_name(page), marks=[_LIBRARY] if _NEEDS.search(page.read_text()) else [])
    for page in PAGES
    if any(block.language != "text" for block in blocks(page))
]


@pytest.mark.parametrize("page", TOLD)
def test_the_examples_of_a_page_do_what_it_says(
    page: Path, tmp_path: Path, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in _NEEDS.findall(page.read_text()):
        pytest.importorskip(module)
    monkeypatch.chdir(tmp_path)
    story = Story(tmp_path, serve)
    for block in blocks(page):
        failure = ""
        try:
            story.tell(block)
        except AssertionError as error:
            failure = f"{_name(page)}:{block.line}: {error}"
        if failure:
            pytest.fail(failure, pytrace=False)
    if story.host is not None and story.host.process.poll() is None:
        assert story.host.stop() == 0, story.host.output


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


def _anchors(page: Path) -> set[str]:
    """The fragments under which headings are found."""
    prose = _PART.sub("", page.read_text())
    return {
        re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        for heading in _HEADING.findall(prose)
    }


@pytest.mark.parametrize("page", PAGES, ids=_name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in _LINK.findall(_PART.sub("", page.read_text())):
        if re.match(r"[a-z]+:", target):
            continue
        path, _, fragment = target.partition("#")
        there = (page.parent / path).resolve() if path else page
        assert there.exists(), f"{target} leads nowhere"
        if fragment:
            assert fragment in _anchors(there), f"{target}: no such heading"


def test_names_of_pages_have_hyphens_between_words() -> None:
    names = [page.stem for page in (ROOT / "docs").rglob("*.md")]
    assert [name for name in names if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name)] == []


SOURCES = [
    path
    for folder in (*module_table.PACKAGES, "tests", "benchmarks", "examples")
    for path in sorted((ROOT / folder).rglob("*.py"))
]
_CITATION = re.compile(r"(docs/[\w/-]+\.md),? ((?:\"[^\"]+\"(?:, and |, | and | to )?)+)?(\d)?")


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_comments_cite_headings_that_exist_by_their_names(path: Path) -> None:
    text = re.sub(r"\s*\n\s*(?:# )?", " ", path.read_text())
    for page, headings, digit in _CITATION.findall(text):
        assert (ROOT / page).is_file(), page
        assert not digit, f"{page} is cited by a number"
        titles = [
            re.sub(r"^[\d.]+b? |`", "", title)
            for title in _HEADING.findall((ROOT / page).read_text())
        ]
        for name in re.findall(r'"([^"]+)"', headings):
            found = [title for title in titles if name in (title, title.partition(" (")[0])]
            assert found, f"{page} has no heading {name}"


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
    text = re.sub(r"```.*?```", "", module_table.PAGE.read_text(), flags=re.DOTALL)
    text = text.split(module_table.BEGIN)[0]
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


def test_the_tour_lists_every_module_with_its_summary() -> None:
    assert module_table.tables() in module_table.PAGE.read_text(), "python -m tests.module_table"


def test_diagrams_are_drawn_from_their_texts() -> None:
    assert pictures.DIAGRAMS
    for path in pictures.DIAGRAMS:
        drawn = path.with_suffix(".svg").read_text()
        assert pictures.diagram(path.read_text()) == drawn, "make pictures"


def test_screenshots_show_the_pages_as_they_are() -> None:
    current = {name: pictures.sources(name) for name in pictures.SCREENSHOTS}
    assert pictures.taken() == current, "make pictures (needs Chromium)"
    assert all((pictures.FOLDER / f"{name}.png").is_file() for name in current)
