"""The server's end of the process that reads object stores; it starts with the first request."""

from __future__ import annotations

import asyncio
import dataclasses
import importlib.util
import itertools
import socket
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import suppress
from pathlib import Path

from host.errors import ErrorCode, HostError, unsupported
from host.repository.object_store.messages import (
    BEAT_SECONDS,
    LONGEST_LINE,
    Cancel,
    Failure,
    Reply,
    Request,
    decode_reply,
    encode_line,
)
from host.repository.object_store.stored_object import ObjectChanged, StoredObject

_SILENT_BEATS = 30  # after which the process counts as hanging
_ENTRY = str(Path(__file__).with_name("worker.py"))


def check_library(url: str) -> None:
    """Raises HostError UNSUPPORTED if the library that reads object stores is missing."""
    if importlib.util.find_spec("obstore") is None:
        raise unsupported(
            f"'{url}' needs the package obstore: pip install 'pbhost[cloud]' with the Python"
            f" {sys.executable}"
        )


class StoreProcess:
    """One process for all stores of a server. Belongs to the event loop.

    `parts`: the most objects, or parts of large ones, that it reads at the same time.
    """

    def __init__(self, parts: int) -> None:
        self._parts = parts
        self._process: subprocess.Popen[bytes] | None = None
        self._writer: asyncio.StreamWriter | None = None
        self._reading: asyncio.Task[None] | None = None
        self._starting = asyncio.Lock()
        self._replies: dict[int, asyncio.Queue[Reply]] = {}
        self._heard = False
        self._fault = ""  # why the process was killed
        self._ids = itertools.count(1)

    async def send(
        self,
        url: str,
        stall_seconds: float,
        folder: str = "",
        stored: StoredObject | None = None,
        path: str = "",
    ) -> AsyncIterator[Reply]:
        """Sends a request, and yields its replies. Raises HostError.

        Leaving the iteration before the last reply cancels the request.
        """
        request = Request(next(self._ids), url, stall_seconds, folder, stored, path)
        writer = await self._connect()
        queue = self._replies[request.id] = asyncio.Queue()
        writer.write(encode_line(request))
        ended = False
        objects: list[StoredObject] = []
        try:
            while not ended:
                reply = await queue.get()
                ended = reply.ended
                if reply.objects is not None:
                    objects += reply.objects
                    if not ended:
                        continue
                    reply = dataclasses.replace(reply, objects=objects)
                if reply.failure is not None:
                    if reply.failure.changed:
                        raise ObjectChanged(reply.failure.message)
                    raise HostError(ErrorCode[reply.failure.code], reply.failure.message)
                yield reply
        finally:
            self._replies.pop(request.id, None)
            if not ended and not writer.is_closing():
                writer.write(encode_line(Cancel(request.id)))

    async def _connect(self) -> asyncio.StreamWriter:
        """Starts the process if it does not run."""
        async with self._starting:
            if self._writer is None:
                own, other = socket.socketpair()
                try:
                    with other:
                        self._process = await asyncio.to_thread(self._start, other)
                    reader, writer = await asyncio.open_connection(sock=own, limit=LONGEST_LINE)
                except BaseException:  # also if cancelled
                    own.close()
                    raise
                self._reading = asyncio.get_running_loop().create_task(self._read(reader))
                self._writer = writer
            return self._writer

    def _start(self, connection: socket.socket) -> subprocess.Popen[bytes]:
        command = [sys.executable, _ENTRY, str(self._parts)]
        return subprocess.Popen(command, stdin=connection.fileno(), stdout=subprocess.DEVNULL)

    async def _read(self, reader: asyncio.StreamReader) -> None:
        watching = asyncio.get_running_loop().create_task(self._watch())
        try:
            with suppress(ConnectionError):
                while line := await reader.readline():
                    self._heard = True
                    reply = decode_reply(line)
                    queue = self._replies.get(reply.id)
                    if queue is not None:
                        queue.put_nowait(reply)
                    if reply.objects is not None:
                        await asyncio.sleep(0)  # a listing has many, and all may be there
        finally:  # whatever ends it: no reply comes any more
            watching.cancel()
            await self._end()

    async def _watch(self) -> None:
        """Kills the process when it is silent for long while requests wait."""
        silent = 0  # beats, and not seconds: this process may have been stopped itself
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            silent = 0 if self._heard or not self._replies else silent + 1
            self._heard = False
            if silent >= _SILENT_BEATS and self._process is not None:
                seconds = silent * BEAT_SECONDS
                self._fault = f"did not respond for {seconds:g} s, and was killed"
                self._process.kill()
                return

    async def _end(self) -> None:
        """Ends the process; requests that wait for a reply fail."""
        status = await asyncio.to_thread(self._end_process)
        if self._writer is not None:
            self._writer.close()
            self._writer = None
        fault, self._fault = self._fault or f"has ended with status {status}", ""
        text = f"the process that reads object stores {fault}"
        failure = Failure(ErrorCode.UNAVAILABLE.name, text, False)
        for number, queue in self._replies.items():
            queue.put_nowait(Reply(number, ended=True, failure=failure))

    def _end_process(self) -> int:
        """Kills the process, if it still runs; returns its exit status. Blocks."""
        process, self._process = self._process, None
        if process is None:
            return 0
        process.kill()
        return process.wait()

    async def close(self) -> None:
        """Ends the process, and what it reads."""
        reading, self._reading = self._reading, None
        if reading is not None:
            reading.cancel()
            await asyncio.wait([reading])
        await self._end()
