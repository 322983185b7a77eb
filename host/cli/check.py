"""`pbhost check`: reports all problems of the models in repositories, without a server."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from host.cli.arguments import make_parser
from host.errors import HostError, invalid_argument
from host.lint.ensembles import check_ensembles
from host.lint.model import CheckedModel, LintSettings, check_model
from host.lint.problem import Problem
from host.models.backends import Backends
from host.repository.repository import Repository, RepositoryScan

_EXIT_OK, _EXIT_PROBLEMS, _EXIT_UNUSABLE = 0, 1, 2

_DESCRIPTION = """\
Checks every model of the repositories and reports all problems that would prevent a server from
loading it. No server is started and no model is imported. Fields that a model can complete itself,
with auto_complete_config, are not reported as missing."""

_EPILOG = """\
Each problem is printed as PATH:LINE:COLUMN: error: FIELD: PROBLEM (SUGGESTION). Problems with
which a server still loads the model are warnings instead of errors.

examples:
  pbhost check models
  pbhost check models more_models --strict --format=json

exit status: 0 no errors; 1 errors, or warnings with --strict; 2 the command line is invalid, or a
path is not a repository"""


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the problems and exits; the status tells CI whether there are errors."""
    args = _parser().parse_args(arguments)
    sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]  # odd file names
    try:
        scan = _scan(args.repository)
    except HostError as error:
        sys.stderr.write(f"pbhost check: {error.message}\n")
        sys.exit(_EXIT_UNUSABLE)
    problems = _problems(scan, args)
    errors = sum(not problem.warning for problem in problems)
    if args.format == "json":
        facts = [problem.to_dict for problem in problems]
        counts = {"models": len(scan.models), "errors": errors, "warnings": len(facts) - errors}
        sys.stdout.write(json.dumps({**counts, "problems": facts}, indent=2) + "\n")
    else:
        lines = [f"{problem.format_line}\n" for problem in problems]
        counted = (
            _with_count(len(scan.models), "model"),
            _with_count(errors, "error"),
            _with_count(len(lines) - errors, "warning"),
        )
        sys.stdout.write("".join(lines) + "{}: {}, {}\n".format(*counted))
    sys.exit(_EXIT_PROBLEMS if errors else _EXIT_OK)


def _scan(paths: Sequence[Path]) -> RepositoryScan:
    """Lists the models to check. Raises HostError unless all paths are repositories."""
    for path in paths:
        if not path.is_dir():
            what = "is a file, expected a model repository" if path.exists() else "does not exist"
            raise invalid_argument(f"'{path}' {what}")
        if (path / "config.pbtxt").is_file():
            raise invalid_argument(
                f"'{path}' is a model directory, expected a model repository:"
                f" '{path.absolute().parent}'"
            )
    return Repository(paths).scan()


def _problems(scan: RepositoryScan, args: argparse.Namespace) -> list[Problem]:
    """Returns all problems, sorted and without duplicates."""
    settings = LintSettings(
        Backends(args.backend_directory),
        strict=args.disable_auto_complete_config,
        config_name=args.model_config_name,
    )
    problems = [Problem(path, failure.message) for path, failure in scan.failures.items()]
    models: dict[str, CheckedModel] = {}
    for name, directory in scan.models.items():
        models[name] = check_model(directory, settings)
        if directory.duplicated:
            text = f"model '{name}' is not unique across all model repositories"
            problems.append(Problem(directory.path, text))
    check_ensembles(models)
    problems += [problem for model in models.values() for problem in model.problems]
    if args.strict:
        problems = [replace(problem, warning=False) for problem in problems]
    return sorted(set(problems), key=lambda problem: problem.sort_key)


def _with_count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"


def _parser() -> argparse.ArgumentParser:
    parser = make_parser("check", _DESCRIPTION, _EPILOG)
    add = parser.add_argument
    add(
        "repository",
        type=Path,
        nargs="+",
        metavar="REPOSITORY",
        help="directory that contains model directories",
    )
    add("--strict", action="store_true", help="report warnings as errors")
    add("--format", choices=("text", "json"), default="text", help="output format (%(default)s)")
    add(
        "--disable-auto-complete-config",
        action="store_true",
        help="require complete configurations, as in pbhost serve",
    )
    add("--model-config-name", metavar="NAME", help="as in pbhost serve")
    return parser
