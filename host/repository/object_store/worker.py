"""The process that reads object stores, apart from the server that answers requests.

`worker.py PARTS`; its standard input is a socket to the server, with whose end it ends. The library
has threads of its own that use the interpreter, also while it is shut down: so this process ends
without that.
"""

from __future__ import annotations

import os
import sys

if __name__ == "__main__":
    _here = os.path.dirname(os.path.abspath(__file__))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _here)  # otherwise Python has done this
    sys.path[0] = os.path.abspath(os.path.join(_here, "..", "..", ".."))

import asyncio
import signal
import socket
import time
import traceback
from pathlib import Path

from setproctitle import setproctitle

from host.errors import HostError, internal
from host.repository.object_store.credentials import read_settings
from host.repository.object_store.location import parse_store_url
from host.repository.object_store.messages import (
    BEAT_SECONDS,
    LONGEST_LINE,
    SIGN_OF_LIFE,
    Cancel,
    Failure,
    Reply,
    Request,
    decode_request,
    encode_line,
)
from host.repository.object_store.store import ObjectStore, Slots
from host.repository.object_store.stored_object import ObjectChanged

_FLUSH_SECONDS = 0.2
_LISTED_AT_ONCE = 500  # objects in a reply
_SETTINGS_SECONDS = 1.0  # until credentials are read again, which may be rotated
_PARTS_ARGUMENT = 1


class Worker:
    """Carries out the requests of the server, all at the same time."""

    def __init__(self, writer: asyncio.StreamWriter, parts: int) -> None:
        self._writer = writer
        self._slots = Slots(parts)
        self._stores: dict[tuple[str, float], ObjectStore] = {}
        self._settings_read: dict[tuple[str, float], float] = {}
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._received: dict[int, int] = {}  # what no reply has told yet
        self._flushing: asyncio.TimerHandle | None = None
        self._beating: asyncio.TimerHandle | None = None

    def take(self, message: Request | Cancel) -> None:
        """Starts or ends a request."""
        if isinstance(message, Cancel):
            task = self._tasks.get(message.cancelled)
            if task is not None:
                task.cancel()
            return
        task = asyncio.get_running_loop().create_task(self._carry_out(message))
        self._tasks[message.id] = task
        task.add_done_callback(lambda _: self._tasks.pop(message.id))
        if self._beating is None:
            self._beat()

    async def _carry_out(self, request: Request) -> None:
        objects, content, failure = None, None, None
        try:
            store, stored = self.find_store(request), request.stored
            if stored is None:
                objects = await store.list(request.folder)
            elif not request.path:
                content = await store.read(stored, self._slots)
            else:
                await store.fetch(
                    stored,
                    Path(request.path),
                    self._slots,
                    lambda count: self._add_received(request.id, count),
                )
        except HostError as error:
            changed = isinstance(error, ObjectChanged)
            failure = Failure(error.code.name, error.message, changed)
        except OSError as error:
            text = f"failed to write {request.path}: {error.strerror or error}"
            failure = Failure(internal("").code.name, text, False)
        except Exception as error:  # a defect, of which the server has to know, too
            traceback.print_exc()
            failure = Failure(internal("").code.name, f"unexpected {error!r}", False)
        received = self._received.pop(request.id, 0)
        while objects is not None and len(objects) > _LISTED_AT_ONCE:
            self._send(Reply(request.id, objects=objects[:_LISTED_AT_ONCE]))
            objects = objects[_LISTED_AT_ONCE:]
        self._send(Reply(request.id, received, True, objects, content, failure))

    def find_store(self, request: Request) -> ObjectStore:
        """The store of a request. Raises HostError."""
        key, now = (request.url, request.stall_seconds), time.monotonic()
        store = self._stores.get(key)
        if store is None or now - self._settings_read[key] > _SETTINGS_SECONDS:
            location = parse_store_url(request.url)
            settings = read_settings(location, os.environ)
            self._settings_read[key] = now
            if store is None or store.settings != settings:
                store = ObjectStore(location, settings, request.stall_seconds)
                self._stores[key] = store
        return store

    def _add_received(self, request: int, count: int) -> None:
        self._received[request] = self._received.get(request, 0) + count
        if self._flushing is None:
            loop = asyncio.get_running_loop()
            self._flushing = loop.call_later(_FLUSH_SECONDS, self._flush)

    def _flush(self) -> None:
        self._flushing = None
        received, self._received = self._received, {}
        for request, count in received.items():
            self._send(Reply(request, count))

    def _beat(self) -> None:
        """Shows, while there are requests, that this process runs."""
        self._beating = None
        if self._tasks:
            self._send(Reply(SIGN_OF_LIFE))
            self._beating = asyncio.get_running_loop().call_later(BEAT_SECONDS, self._beat)

    def _send(self, reply: Reply) -> None:
        self._writer.write(encode_line(reply))


async def _run(parts: int) -> None:
    with socket.socket(fileno=os.dup(0)) as connection:
        reader, writer = await asyncio.open_connection(sock=connection, limit=LONGEST_LINE)
        worker = Worker(writer, parts)
        while line := await reader.readline():
            worker.take(decode_request(line))
        os._exit(0)


if __name__ == "__main__":
    setproctitle("pbhost-object-store")
    # The server ends it, also if a signal goes to the whole group: models are fetched until then.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        asyncio.run(_run(int(sys.argv[_PARTS_ARGUMENT])))
    except ConnectionError:
        os._exit(0)  # the server has ended
