"""The host process of bound functions: a child of the process that defines them (the caller).

`python .../host/cli/bound.py CALLER LAUNCHES CONTROL FLAG ...`: the pid of the caller, two socket
descriptors, and flags of `pbhost serve`. The socket `CONTROL` carries one JSON object per line
(docs/explanation/decisions/0016):

* The caller sends `{"bind": CONFIG, "version": N}` to serve a model, `{"serve": true}` to load the
  first models and open the ports, and `{"stop": true}`. All but the last have a `"number"`.
* The host replies to `serve` with `{"serving": PORTS}` or `{"failed": TEXT}`, and to `bind` with
  `{"bound": NAME}` or `{"refused": TEXT}`; `"to"` is the number of the command.
"""

import os
import sys

if __name__ == "__main__":
    # This file is started by its path. Without this directory on the import path, the names of
    # these modules and those of the user cannot hide each other.
    _here = os.path.dirname(os.path.realpath(__file__))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _here)  # otherwise Python has done this
    sys.path[0] = os.path.dirname(os.path.dirname(_here))

import asyncio
import json
import shutil
import signal
import socket
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from host.config.json_form import from_json
from host.config.model_config import checked_load_name
from host.config.pbtxt import to_pbtxt
from host.errors import HostError, internal
from host.instances.launchers import BoundProcessLauncher
from host.options.command_line import parse
from host.options.options import UsageError
from host.server.server import Server
from host.system.event_loop import run_event_loop
from host.system.files import PrivateDirectory
from host.system.host_process import open_standard_streams
from stub.wire.heap import freeze_gc, tune_malloc

_MAX_LINE_BYTES = 1 << 24
_PLACEHOLDER = "# The function is in the process that has bound it.\n"


def main(arguments: Sequence[str]) -> int:
    """Serves the caller until it stops the host or exits; returns the exit status."""
    open_standard_streams()
    caller, launches, control = map(int, arguments[:3])
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the caller handles Ctrl-C and stops the host
    signal.signal(signal.SIGPIPE, signal.SIG_IGN)
    os.setpgid(0, 0)  # but in the caller's session: docs/explanation/decisions/0031
    signal.signal(signal.SIGTTOU, signal.SIG_IGN)  # a background process may write to the terminal
    try:
        caller_pidfd = os.pidfd_open(caller)
    except ProcessLookupError:
        return 1
    if os.getppid() != caller:
        return 1
    folder = PrivateDirectory()
    sockets = [socket.socket(fileno=fd) for fd in (launches, control)]
    try:
        tune_malloc(one_heap=True)
        freeze_gc()
        service = _Service(arguments[3:], folder.path / "models", *sockets)
        return run_event_loop(service.run(caller_pidfd))
    finally:
        for sock in sockets:
            sock.close()
        folder.close()


class _Service:
    """Runs the commands of one caller. `models`: the model repository, which it writes."""

    def __init__(
        self, flags: Sequence[str], models: Path, launches: socket.socket, control: socket.socket
    ) -> None:
        self._flags = flags
        self._models = models
        self._launches = launches
        self._control = control
        self._server: Server | None = None

    async def run(self, caller: int) -> int:
        """Runs until the caller stops it or exits; returns the exit status.

        `caller` is the pidfd of the caller.
        """
        self._models.mkdir()
        reader, self._writer = await asyncio.open_connection(
            sock=self._control, limit=_MAX_LINE_BYTES
        )
        commands = asyncio.ensure_future(self._handle_commands(_read_commands(reader)))
        loop = asyncio.get_running_loop()
        loop.add_reader(caller, commands.cancel)
        loop.add_signal_handler(signal.SIGTERM, commands.cancel)
        try:
            await commands
        except (asyncio.CancelledError, ConnectionError):
            pass  # the caller was killed, or the host is stopping
        finally:
            loop.remove_reader(caller)
            os.close(caller)
            in_time = self._server is None or await self._server.stop()
            self._writer.close()
        return 0 if in_time else 1

    async def _handle_commands(self, lines: AsyncIterator[Mapping[str, Any]]) -> None:
        async for command in lines:
            if "stop" in command:
                return
            if "serve" in command:
                reply = await self._start()
            else:
                reply = await self._bind(command["bind"], command["version"])
            self._writer.write(json.dumps({**reply, "to": command["number"]}).encode() + b"\n")

    async def _start(self) -> Mapping[str, object]:
        try:
            options = parse(
                [
                    f"--model-repository={self._models}",
                    "--model-control-mode=explicit",
                    "--load-model=*",
                    "--disable-auto-complete-config",
                    *self._flags,
                ]
            )
            server = Server(options, BoundProcessLauncher(self._launches))
            await server.start()
        except UsageError as error:
            return {"failed": error.detail}
        except HostError as error:
            return {"failed": error.message}
        self._server = server
        return {"serving": [server.grpc_port, server.http_port, server.metrics_port]}

    async def _bind(self, config: Mapping[str, Any], version: int) -> Mapping[str, object]:
        try:
            name = checked_load_name(str(config["name"]))
            folder = self._models / name
            text = to_pbtxt(from_json(config))
            try:
                await asyncio.to_thread(_write_model, folder, version, text)
                if self._server is not None:
                    await self._server.core.control.load_model(name, {})
            except HostError:
                await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)
                raise
        except HostError as error:
            # The cause has the reason; the error text for clients does not.
            why = error.__cause__ if isinstance(error.__cause__, HostError) else error
            return {"refused": why.message}
        return {"bound": name}


def _write_model(folder: Path, version: int, config: str) -> None:
    """Writes a model into the repository. Raises HostError."""
    code = folder / str(version) / "model.py"
    try:
        code.parent.mkdir(parents=True)
        code.write_text(_PLACEHOLDER)
        (folder / "config.pbtxt").write_text(config, encoding="utf-8")
    except OSError as error:  # for example, a full disk
        raise internal(f"cannot write model '{folder.name}': {error}") from error


async def _read_commands(reader: asyncio.StreamReader) -> AsyncIterator[Mapping[str, Any]]:
    """Yields the commands of the caller until it closes the connection."""
    while line := await reader.readline():
        yield json.loads(line)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
