"""`pbhost serve`: serves model repositories until a signal stops it."""

from __future__ import annotations

import asyncio
import logging
import os
import resource
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

from host.errors import HostError, ServiceStartError
from host.logs.formats import format_json
from host.logs.log_handler import write_if_room
from host.options.command_line import parse
from host.options.flags import describe_misuse
from host.options.options import Options, UsageError
from host.server.server import Server
from host.system.event_loop import run_event_loop
from host.system.service_manager import ServiceManager
from stub.wire.heap import freeze_gc, tune_malloc


def main(arguments: Sequence[str]) -> NoReturn:
    """Serves until a signal; exits with 0, or with 1 and a message on stderr."""
    try:
        options = parse(arguments)
    except UsageError as error:
        if not error.detail:  # of --help
            sys.stdout.write(str(error))
            sys.exit(0)
        log_format = _requested_format(arguments)
        text = describe_misuse("serve", error.detail, error.advice)
        sys.stderr.write(_line(log_format, logging.ERROR, text))
        sys.exit(1)
    _raise_file_limit()
    tune_malloc(one_heap=True)
    freeze_gc()
    sys.exit(run_event_loop(_serve(options)))


def _requested_format(arguments: Sequence[str]) -> str:
    """Returns the value of `--log-format`, as far as it is known while another flag is wrong."""
    words = " ".join(arguments).replace("--log-format ", "--log-format=").split()
    found = [word for word in words if word.startswith("--log-format=")]
    default = os.environ.get("PBHOST_LOG_FORMAT", "")
    return found[-1].partition("=")[2] if found else default


def _raise_file_limit() -> None:
    """Raises the limit on open files: each stub needs about ten descriptors."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def _serve(options: Options) -> int:
    """Serves until SIGINT or SIGTERM; returns the exit status. SIGHUP reads files again."""
    stop = asyncio.Event()
    manager = ServiceManager()
    manager.start_watchdog()
    try:
        return await _serve_until(stop, Server(options), manager)
    finally:
        manager.close()


async def _serve_until(stop: asyncio.Event, server: Server, manager: ServiceManager) -> int:
    _install_signal_handlers(stop, server, manager)
    manager.starting()
    starting = asyncio.ensure_future(server.start())
    stopping = asyncio.ensure_future(stop.wait())
    await asyncio.wait([starting, stopping], return_when=asyncio.FIRST_COMPLETED)
    if not starting.done():
        starting.cancel()
    try:
        await starting
    except ServiceStartError as error:  # the log has the reason
        stopping.cancel()
        reason = f"{error.code.value} - {error.message}"
        if server.options.log_error and not server.options.log_file:
            reason = error.summary
    except HostError as error:
        stopping.cancel()
        reason = f"{error.code.value} - {error.message}"
    except OSError as error:  # for example, a limit on files or memory
        stopping.cancel()
        reason = f"Internal - {error}"
    except asyncio.CancelledError:
        return 0  # stopped while loading; `start` has cleaned up
    else:
        manager.started()
        await stopping
        return 0 if await server.stop() else 1
    manager.failed(reason)
    sys.stderr.write(
        _line(server.options.log_format, logging.ERROR, f"error: creating server: {reason}")
    )
    return 1


def _line(log_format: str, level: int, text: str) -> str:
    """Returns a line for the console in the format of the log if that is JSON."""
    if log_format != "json":
        return f"{text}\n"
    number = sys._getframe(1).f_lineno
    record = logging.LogRecord("pbhost", level, __file__, number, text, (), None)
    return f"{format_json(record)}\n"


def _install_signal_handlers(stop: asyncio.Event, server: Server, manager: ServiceManager) -> None:
    loop = asyncio.get_running_loop()
    reloads: set[asyncio.Task[None]] = set()

    def received(number: int) -> None:
        if not stop.is_set():
            stop.set()
            manager.stopping()
            line = _line(server.options.log_format, logging.INFO, f"Signal ({number}) received.")
            write_if_room(sys.stdout.fileno(), line.encode())

    async def reload_files() -> None:
        manager.reloading()
        await server.reload_files()
        manager.reloaded()

    def reload() -> None:
        task = loop.create_task(reload_files())
        reloads.add(task)
        task.add_done_callback(reloads.discard)

    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, received, number)
    # At a terminal, SIGHUP says that the terminal has been closed; then it ends the server.
    if not os.isatty(0):
        loop.add_signal_handler(signal.SIGHUP, reload)
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
