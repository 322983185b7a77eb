"""The `pbhost` command."""

from __future__ import annotations

import asyncio
import difflib
import resource
import shlex
import signal
import sys

import uvloop

from host.cli import check as lint
from host.cli import config as config_command
from host.cli import run as foreground
from host.core import VERSION
from host.errors import HostError
from host.options.command_line import parse
from host.options.options import Options, UsageError
from host.server.server import Server
from host.system.standard_streams import open_standard_streams
from stub.wire.heap import freeze_gc, tune_malloc

_USAGE = """\
Usage: pbhost serve --model-repository=DIR [options]
           serve the models of a folder to clients, over gRPC and HTTP
       pbhost run MODEL_DIR [--input NAME=VALUE ...] [options]
           send one request to one model, without a server
       pbhost check REPOSITORY ... [options]
           say what is wrong with the models of a folder
       pbhost config MODEL_DIR | FILE [options]
           print the configuration that a model is served with
       pbhost COMMAND --help
       pbhost version
"""

_SUBCOMMANDS = {"run": foreground.main, "check": lint.main, "config": config_command.main}
"""The subcommands other than `serve`."""


def main() -> None:
    """Runs `pbhost <command> ...`; exits with 0, or with 1 after a message on stderr."""
    open_standard_streams()
    arguments = sys.argv[1:]
    if arguments and arguments[0] in _SUBCOMMANDS:
        _SUBCOMMANDS[arguments[0]](arguments[1:])
    if arguments[:1] in (["--help"], ["-h"]):
        sys.stdout.write(_USAGE)
        sys.exit(0)
    if arguments[:1] in (["version"], ["--version"]):
        import importlib.metadata  # slow to import

        sys.stdout.write(f"pbhost {importlib.metadata.version('pbhost')} (as Triton {VERSION})\n")
        sys.exit(0)
    if arguments[:1] != ["serve"]:
        sys.stderr.write(f"{_USAGE}\n{_without_command(arguments)}\n")
        sys.exit(1)
    try:
        options = parse(arguments[1:])
    except UsageError as error:
        sys.stderr.write(f"{error}\n")
        sys.exit(1)
    _raise_file_limit()
    tune_malloc()
    freeze_gc()
    sys.exit(uvloop.run(serve(options)))


def _without_command(arguments: list[str]) -> str:
    """The error of a command line without a command."""
    if not arguments:
        return "a command must be given"
    if arguments[0].startswith("-"):
        return f"a command must come first: pbhost serve {shlex.join(arguments)}"
    close = difflib.get_close_matches(arguments[0], ["serve", "version", *_SUBCOMMANDS], n=1)
    hint = f", did you mean '{close[0]}'?" if close else ""
    return f"unknown command '{arguments[0]}'{hint}"


def _raise_file_limit() -> None:
    """Raises the limit of open files, as every stub needs about ten descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve(options: Options) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status."""
    stop = asyncio.Event()
    _install_signal_handlers(stop)
    server = Server(options)
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
    except HostError as error:
        stopping.cancel()
        sys.stderr.write(f"error: creating server: {error.code.value} - {error.message}\n")
        return 1
    except OSError as error:  # e.g. a limit of this process on files or memory
        stopping.cancel()
        sys.stderr.write(f"error: creating server: Internal - {error}\n")
        return 1
    except asyncio.CancelledError:
        return 0  # stopped while loading; `start` has cleaned up
    await stopping
    return 0 if await server.stop() else 1


def _install_signal_handlers(stop: asyncio.Event) -> None:
    loop = asyncio.get_running_loop()

    def received(number: int) -> None:
        if not stop.is_set():
            stop.set()
            try:
                sys.stdout.write(f"Signal ({number}) received.\n")
                sys.stdout.flush()
            except OSError:
                pass  # the reader has gone, or its disk is full; neither matters here

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received, number)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)


if __name__ == "__main__":
    main()
