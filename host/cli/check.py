"""`pbhost check`: reports all problems of the models in repositories, without a server."""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import NoReturn

from host.cli.arguments import EXIT_FAILED, EXIT_USAGE, errors_end, fail, format_flag, parse_texts
from host.cli.model_arguments import serve_flag
from host.config.findings import Problem
from host.errors import HostError, invalid_argument
from host.lint.model_folder import (
    CheckedModel,
    LintSettings,
    check_ensembles,
    check_model,
    choose_files,
)
from host.logs.formats import Colour, paint, shows_colours
from host.models.backends import Backends
from host.options.flags import SWITCH, FlagGroup
from host.options.options import Options
from host.options.validators import read_variables
from host.repository.model_directory import ModelDirectory
from host.repository.object_store.location import is_store_url
from host.repository.open_repository import fetch_models
from host.repository.repository import RepositoryScan
from stub.wire.paths import absolute_path

_ABOUT = """\
Checks every model of the repositories and reports all problems that would prevent a server from
loading it. No server is started and no model is imported. Fields that a model can complete itself,
with auto_complete_config, are not reported as missing.

Each problem is printed as PATH:LINE:COLUMN: error: FIELD: PROBLEM (SUGGESTION). Problems with
which a server still loads the model are warnings instead of errors.

examples:
  pbhost check models
  pbhost check models more_models --strict --format=json
  pbhost check models --set-file=production.txt --set max_batch_size=8
  pbhost check s3://bucket/models

exit status: 0 no errors; 1 errors, or warnings with --strict; 2 the command line is invalid, or a
path is not a repository"""

_group = FlagGroup("Check")


@dataclass
class CheckOptions:
    """The flags of `pbhost check`."""

    strict: bool = _group(False, "Report warnings as errors.", SWITCH)
    format: str = format_flag(_group)
    disable_auto_complete_config: bool = serve_flag("disable_auto_complete_config")
    model_config_name: str = serve_flag("model_config_name")
    backend_directory: str = serve_flag("backend_directory")
    repository_cache_directory: str = serve_flag("repository_cache_directory")
    template_assignments: list[str] = serve_flag("template_assignments")
    template_files: list[str] = serve_flag("template_files")


def main(arguments: Sequence[str]) -> NoReturn:
    """Prints the problems and exits; the status tells CI whether there are errors."""
    repositories, options = parse_texts(arguments, "check REPOSITORY ...", _ABOUT, CheckOptions)
    with errors_end("check"):
        try:
            scan = _scan(repositories, options)
        except HostError as error:
            fail("check", error.message, EXIT_USAGE)
        problems = _problems(scan, options)
    errors = sum(not problem.warning for problem in problems)
    if options.format == "json":
        facts = [problem.to_dict for problem in problems]
        counts = {"models": len(scan.models), "errors": errors, "warnings": len(facts) - errors}
        sys.stdout.write(json.dumps({**counts, "problems": facts}, indent=2) + "\n")
    else:
        shown = shows_colours(sys.stdout)
        lines = [
            paint(problem.format_line, Colour.YELLOW if problem.warning else Colour.RED, shown)
            + "\n"
            for problem in problems
        ]
        counted = (
            _with_count(len(scan.models), "model"),
            _with_count(errors, "error"),
            _with_count(len(lines) - errors, "warning"),
        )
        sys.stdout.write("".join(lines) + "{}: {}, {}\n".format(*counted))
    sys.exit(EXIT_FAILED if errors else 0)


def _scan(places: Sequence[str], options: CheckOptions) -> RepositoryScan:
    """Lists the models to check, and fetches what the check reads of those in object stores.

    Raises HostError unless all places are repositories.
    """
    for path in (Path(place) for place in places if not is_store_url(place)):
        if not path.is_dir():
            what = "is a file, expected a model repository" if path.exists() else "does not exist"
            raise invalid_argument(f"'{path}' {what}")
        if (path / "config.pbtxt").is_file():
            raise invalid_argument(
                f"'{path}' is a model directory, expected a model repository:"
                f" '{Path(absolute_path(str(path))).parent}'"
            )
    settings = Options(repository_cache_directory=options.repository_cache_directory)
    choose = partial(choose_files, settings=_lint_settings(options))
    return asyncio.run(fetch_models(places, settings.mirror_settings, choose))


def _lint_settings(options: CheckOptions) -> LintSettings:
    return LintSettings(
        Backends(Path(options.backend_directory)),
        strict=options.disable_auto_complete_config,
        config_name=options.model_config_name or None,
        variables=read_variables(options.template_assignments, options.template_files),
    )


def _problems(scan: RepositoryScan, options: CheckOptions) -> list[Problem]:
    """Returns all problems, sorted and without duplicates."""
    settings = _lint_settings(options)
    problems = [Problem(place, failure.message) for place, failure in scan.failures.items()]
    models: dict[str, CheckedModel] = {}
    for name, directory in scan.models.items():
        models[name] = check_model(directory, settings)
        if directory.duplicated:
            text = f"model '{name}' is not unique across all model repositories"
            problems.append(Problem(directory.path, text))
    check_ensembles(models)
    for name, model in models.items():
        problems += [_place(problem, scan.models[name]) for problem in model.problems]
    if options.strict:
        problems = [replace(problem, warning=False) for problem in problems]
    return sorted(set(problems), key=lambda problem: problem.sort_key)


def _place(problem: Problem, directory: ModelDirectory) -> Problem:
    """The problem with the URL of its file instead of the path in the cache."""
    stored, path = directory.stored, str(problem.path)
    if stored is None or not path.startswith(str(directory.path)):
        return problem
    root, cached = stored.root, str(directory.path)
    return replace(
        problem,
        path=path.replace(cached, root, 1),
        text=problem.text.replace(cached, root),
        advice=problem.advice.replace(cached, root),
    )


def _with_count(count: int, word: str) -> str:
    return f"{count} {word}{'' if count == 1 else 's'}"
