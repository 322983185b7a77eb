"""The host's end of the ZeroMQ connections to all stubs."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from pathlib import Path

import zmq

from host.errors import internal
from host.system.files import PrivateDirectory

_MAX_FRAMES_PER_TURN = 256  # frames handled before other callbacks of the loop run
_MAX_TURN_SECONDS = 0.005  # after this time, too, other callbacks run
_MAX_WAITING_FRAMES = 32  # frames of one stub that ZeroMQ receives ahead


class Channel:
    """One ROUTER socket in a private directory. Belongs to the event loop it was made in.

    It carries what has no ring: the messages for the service threads of stubs. A stub sends one
    frame, so that the socket knows it. ZeroMQ receives at most 32 frames ahead from each stub, and
    the host never stops reading: a stub that sends more neither fills its memory nor blocks.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._folder = PrivateDirectory()
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.setsockopt(zmq.SNDHWM, 0)  # bounded by the instances: one batch each
        self._socket.setsockopt(zmq.RCVHWM, _MAX_WAITING_FRAMES)
        try:
            self._bind(self._folder)
        except OSError as error:
            self._socket.close()
            self._context.term()
            self._folder.close()
            raise internal(
                f"cannot open a socket at {error.filename}: {error.strerror}; set TMPDIR to a short"
                " path of a folder that can be written to"
            ) from error
        self._handlers: dict[bytes, Callable[[bytes], None]] = {}  # by token
        self._fd: int = self._socket.FD  # readable when the socket may have something to read
        self._reading = False
        self._loop.add_reader(self._fd, self._read)

    def open_endpoint(self) -> str:
        """Returns where new stubs connect.

        If the socket's folder was removed, as programs do that clean the folder of temporary files,
        this makes another one. Raises OSError.
        """
        if not self._path.exists():
            folder = PrivateDirectory()
            try:
                self._bind(folder)
            except OSError:
                folder.close()
                raise
            self._socket.unbind(self._endpoint)  # stubs that are connected stay so
            self._folder.close()
            self._folder = folder
        return self._endpoint

    @property
    def _path(self) -> Path:
        return _socket_path(self._folder)

    @property
    def _endpoint(self) -> str:
        return f"ipc://{self._path}"

    def _bind(self, folder: PrivateDirectory) -> None:
        """Accepts stubs in the folder. Raises OSError."""
        endpoint = f"ipc://{_socket_path(folder)}"
        try:
            self._socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise OSError(error.errno, error.strerror, endpoint) from error

    def register(self, token: str, handler: Callable[[bytes], None]) -> None:
        """Passes every frame of the stub with this token to `handler`."""
        self._handlers[token.encode()] = handler

    def unregister(self, token: str) -> None:
        """Drops whatever this stub still sends."""
        self._handlers.pop(token.encode(), None)

    def send(self, token: str, frame: bytes) -> None:
        """Sends a frame to the service thread of a stub.

        Frames for a stub that is gone are dropped.
        """
        self._socket.send(token.encode(), zmq.SNDMORE)
        self._socket.send(frame)
        # ZeroMQ signals only new input, and sending may have consumed the signal.
        if not self._reading and int(self._socket.getsockopt(zmq.EVENTS)) & zmq.POLLIN:
            self._reading = True
            self._loop.call_soon(self._read)

    def _read(self) -> None:
        self._reading = True
        receive = self._socket.recv
        end = time.monotonic() + _MAX_TURN_SECONDS
        for _ in range(_MAX_FRAMES_PER_TURN):
            try:
                identity = receive(zmq.NOBLOCK)
            except zmq.Again:
                self._reading = False
                return
            frame = receive(zmq.NOBLOCK)
            handler = self._handlers.get(identity)
            if handler is not None:
                handler(frame)
                if time.monotonic() > end:
                    break
        self._loop.call_soon(self._read)

    def close(self) -> None:
        """Disconnects from all stubs and removes the directory."""
        self._loop.remove_reader(self._fd)
        self._socket.close()
        self._context.term()
        self._folder.close()


def _socket_path(folder: PrivateDirectory) -> Path:
    return folder.path / "host"
