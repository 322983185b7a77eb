"""The `pbhost` command."""

from __future__ import annotations

import difflib
import shlex
import sys
from typing import NoReturn

from host.system.init_process import fork_from_init
from host.system.standard_streams import open_standard_streams
from stub.wire.dependencies import import_dependencies

_USAGE = """\
Usage: pbhost serve --model-repository=DIR [options]
           serve the models of a repository over gRPC and HTTP
       pbhost new DIR [--kind KIND]
           write a new model, with tests and a client
       pbhost run MODEL_DIR [--input NAME=VALUE ...] [options]
           send one request to one model, without a server
       pbhost infer URL MODEL [--input NAME=VALUE ...] [options]
           send one request to a model of a running server
       pbhost check REPOSITORY ... [options]
           report the problems of the models in a repository
       pbhost config MODEL_DIR | FILE [options]
           print the complete configuration of a model
       pbhost crashes URL | DIRECTORY [options]
           show why processes of models died
       pbhost stacks URL [options]
           show what the instances of a running server do now
       pbhost top URL [options]
           show rates, latencies, queues and memory of a running server
       pbhost completion bash|zsh|fish
           print the completion of this command line for a shell
       pbhost record URL DIRECTORY --model=NAME [options]
           record requests to a running server, with their tensors
       pbhost replay DIRECTORY --against=URL | --run=MODEL_DIR [options]
           send recorded requests again, and compare the responses
       pbhost ray check|config|run REPOSITORY ... [options]
           serve models on a Ray cluster
       pbhost COMMAND --help
       pbhost version
"""

_SUBCOMMANDS = (
    "serve",
    "new",
    "run",
    "infer",
    "check",
    "config",
    "crashes",
    "stacks",
    "top",
    "record",
    "replay",
    "ray",
    "completion",
)


def main() -> None:
    """Runs `pbhost <command> ...`; exits with the status of the command."""
    open_standard_streams()
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        fork_from_init()
    import_dependencies()
    if arguments and arguments[0] in _SUBCOMMANDS:
        _run(arguments[0], arguments[1:])
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        sys.exit(0)
    if arguments[:1] in (["version"], ["--version"]):
        from importlib.metadata import version  # imported here because they are slow

        from host.core import VERSION

        sys.stdout.write(f"pbhost {version('pbhost')} (as Triton {VERSION})\n")
        sys.exit(0)
    sys.stderr.write(f"{_USAGE}\n{_without_command(arguments)}\n")
    sys.exit(1)


def _run(command: str, arguments: list[str]) -> NoReturn:
    # Imported here, because they import the libraries.
    from host.cli import (
        check,
        completion,
        config,
        crashes,
        infer,
        new,
        ray,
        record,
        replay,
        run,
        serve,
        stacks,
        top,
    )

    commands = {
        "serve": serve.main,
        "new": new.main,
        "run": run.main,
        "infer": infer.main,
        "check": check.main,
        "config": config.main,
        "crashes": crashes.main,
        "stacks": stacks.main,
        "top": top.main,
        "ray": ray.main,
        "completion": completion.main,
        "record": record.main,
        "replay": replay.main,
    }
    commands[command](arguments)


def _without_command(arguments: list[str]) -> str:
    """Returns the error for a command line without a valid command."""
    if not arguments:
        return "a command must be given"
    if arguments[0].startswith("-"):
        return f"a command must come first: pbhost serve {shlex.join(arguments)}"
    close = difflib.get_close_matches(arguments[0], ["version", *_SUBCOMMANDS], n=1)
    hint = f", did you mean '{close[0]}'?" if close else ""
    return f"unknown command '{arguments[0]}'{hint}"


if __name__ == "__main__":
    main()
