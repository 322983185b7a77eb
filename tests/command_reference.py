"""The page docs/reference/command-line.md, from the texts of `--help`.

`python -m tests.command_reference` writes it again.
"""

from __future__ import annotations

import contextlib
import io
from pathlib import Path

from host import __main__ as program

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "command-line.md"
HEAD = """\
# The command line

This page has the text of `--help` of each command, and is generated from it. `--help=TEXT` prints
only the flags that have TEXT in their name or description. The flags of `pbhost serve` are in
[Every flag](flags.md#every-flag).

Commands that ask a server take the address of its HTTP port, and `http://localhost:8000` if it is
left out. Errors are one line on standard error. The exit status is 0 for success, 1 for a failure,
and 2 for an invalid command line, unless the text of the command says something else.
"""


def help_of(command: str) -> str:
    """The text of `--help`."""
    printed = io.StringIO()

    main = program._import(command)
    assert main is not None
    with contextlib.redirect_stdout(printed), contextlib.suppress(SystemExit):
        main(["--help"])
    return printed.getvalue().replace("\t", "      ").rstrip("\n")


def page() -> str:
    """The content of the page."""
    sections = [HEAD, f"```text\n{program._USAGE.rstrip()}\n```\n"]
    for command in program._COMMANDS:
        text = help_of(command)
        if command == "serve":  # all its flags have a page
            text = text.partition("\n  --help")[0].rstrip()
            text += "\n\nSee the table of all flags."
        sections.append(f"## pbhost {command}\n\n```text\n{text}\n```\n")
    return "\n".join(sections)


def main() -> None:
    """Writes the page."""
    PAGE.write_text(page())


if __name__ == "__main__":
    main()
