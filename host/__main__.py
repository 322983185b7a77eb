"""The `pbhost` command."""

from __future__ import annotations

import difflib
import gc
import shlex
import signal
import sys
from collections.abc import Callable
from importlib import import_module
from typing import NoReturn

from host.system.host_process import fork_from_init, open_standard_streams
from stub.wire.early_imports import import_dependencies

_USAGE = """\
Usage: pbhost COMMAND [arguments] [options]
       pbhost COMMAND --help
       pbhost COMMAND --help=TEXT    only the flags that have TEXT

write models:
  new DIR [--kind=KIND]                 write a new model, with tests and a client
  run MODEL_DIR [--input=NAME=VALUE]    send one request to one model, without a server
  check REPOSITORY ...                  report the problems of the models in a repository
  config MODEL_DIR|FILE                 print the complete configuration of a model
  tune MODEL_DIR                        find instances and batching of a model by measuring it

serve models:
  serve REPOSITORY ...                  serve the models of a repository over gRPC and HTTP
  ray check|config|run REPOSITORY ...   serve models on a Ray cluster
  wait [URL] [--model=NAME]             wait until a server, or a model, is ready
  models [URL] list|load|unload         list, load and unload the models of a running server

send requests:
  infer [URL] MODEL [--input=NAME=VALUE]
                                        send one request to a model of a running server
  chat [URL] MODEL                      talk to a model of a running server
  bench [URL] MODEL                     send load to a model of a running server, and measure it
  record [URL] DIRECTORY --model=NAME   record requests to a running server, with their tensors
  replay DIRECTORY --against=URL|--run=MODEL_DIR
                                        send recorded requests again, and compare the responses

find problems:
  top [URL]                             show rates, latencies, queues and memory
  stacks [URL]                          show what the instances of a running server do now
  crashes [URL|DIRECTORY]               show why processes of models died
  doctor                                print what a report of a problem needs
  version                               print the versions
  completion bash|zsh|fish              print the completion of this command line for a shell

A URL that is left out is http://localhost:8000.
"""

_COMMANDS = (
    "serve",
    "new",
    "run",
    "infer",
    "chat",
    "bench",
    "check",
    "config",
    "tune",
    "models",
    "wait",
    "crashes",
    "stacks",
    "top",
    "doctor",
    "record",
    "replay",
    "ray",
    "completion",
    "version",
)


def main() -> None:
    """Runs `pbhost <command> ...`; exits with the status of the command."""
    open_standard_streams()
    arguments = sys.argv[1:]
    if arguments[:1] == ["serve"]:
        fork_from_init()
    else:
        # Names of files and texts of models may be no text of the terminal.
        sys.stdout.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    import_dependencies()
    if arguments:
        _run(arguments[0], arguments[1:])
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        sys.exit(0)
    sys.stderr.write(_describe_misuse(arguments))
    sys.exit(2)


def _run(command: str, arguments: list[str]) -> None:
    """Runs a command, which exits; returns if there is no such command."""
    gc.disable()  # modules make much that stays and hardly any garbage: collections only take time
    command_main = _import(command)
    gc.enable()
    if command_main is not None:
        if signal.getsignal(signal.SIGINT) is signal.SIG_DFL:  # see pbhost.__main__
            signal.signal(signal.SIGINT, signal.default_int_handler)
        command_main(arguments)


def _import(command: str) -> Callable[[list[str]], NoReturn] | None:
    """Returns the function of a command: `main` in the module of its name.

    Imports it alone, because each needs other libraries.
    """
    if command in ("version", "--version"):
        from host.cli.doctor import print_version

        return print_version
    if command not in _COMMANDS:
        return None
    main: Callable[[list[str]], NoReturn] = import_module(f".cli.{command}", __package__).main
    return main


def _describe_misuse(arguments: list[str]) -> str:
    """Returns the error for a command line without a valid command."""
    if not arguments:
        return f"{_USAGE}\na command must be given\n"
    if arguments[0].startswith("-"):
        error = f"a command must come first: pbhost serve {shlex.join(arguments)}"
    else:
        close = difflib.get_close_matches(arguments[0], _COMMANDS, n=1)
        hint = f"did you mean '{close[0]}'? " if close else ""
        error = f"unknown command '{arguments[0]}'; {hint}pbhost --help lists all commands"
    return f"pbhost: {error}\n"


if __name__ == "__main__":
    main()
