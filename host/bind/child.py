"""Starts the host of bound functions as a child process, sends it commands and stops it."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from host.bind.errors import HostFailure
from host.bind.specs import ModelSpec
from stub.thread_worker import ModelProvider, ThreadServer

_ENTRY = str(Path(__file__).resolve().parents[1] / "cli" / "bound.py")


class HostProcess:
    """A host in a child process. It serves nothing until `serve` is called.

    `take`: returns the instance to serve for a model's name. `on_exit`: called on another thread
    when the process exits. Raises HostFailure.
    """

    def __init__(
        self, flags: Sequence[str], take: ModelProvider, on_exit: Callable[[], None]
    ) -> None:
        ours, theirs = socket.socketpair()
        launches, asked = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        inherited = [asked.fileno(), theirs.fileno()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, _ENTRY, str(os.getpid()), *map(str, inherited), *flags],
                pass_fds=inherited,
                stdin=subprocess.DEVNULL,
            )
        except OSError as error:
            ours.close()
            launches.close()
            raise HostFailure(f"cannot start a host: {error}") from error
        finally:
            theirs.close()
            asked.close()
        self._owner_pid = os.getpid()
        self._on_exit = on_exit
        self._control = ours
        self._request_count = 0
        self._replies: dict[int, Mapping[str, Any]] = {}  # by the number of the command
        self._reply_received = threading.Condition()
        self._request_lock = threading.Lock()
        self._exited = False
        self._instances = ThreadServer(launches, take)
        self._reader = threading.Thread(
            target=self._read_replies, name="pbhost-control", daemon=True
        )
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether the host runs. False in a fork of this process."""
        return not self._exited and self._is_owner

    @property
    def _is_owner(self) -> bool:
        return os.getpid() == self._owner_pid

    def _read_replies(self) -> None:
        try:
            with self._control.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    reply = json.loads(line)
                    with self._reply_received:
                        self._replies[reply["to"]] = reply
                        self._reply_received.notify_all()
        except OSError:
            pass  # the host exited without closing the socket
        self._process.wait()
        with self._reply_received:
            self._exited = True
            self._reply_received.notify_all()
        self._on_exit()

    def bind(self, spec: ModelSpec) -> None:
        """Serves a model, at once or as soon as the host serves. Raises HostFailure."""
        self._request({"bind": spec.model_config(), "version": int(spec.version)})

    def serve(self) -> list[int]:
        """Loads the bound models and opens the ports; returns those of gRPC, HTTP and metrics.

        Raises HostFailure.
        """
        ports: list[int] = self._request({"serve": True})["serving"]
        return ports

    def _request(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Sends a command and returns the reply. Raises HostFailure, also if the host exits."""
        if not self._is_owner:
            raise HostFailure(
                f"this process is a fork; only process {self._owner_pid} can use this host"
            )
        with self._request_lock:
            self._request_count += 1
            # Ctrl-C can leave a reply unread; the number keeps it apart from the next one.
            number = self._request_count
            self._send({**command, "number": number})
            with self._reply_received:
                self._reply_received.wait_for(lambda: number in self._replies or self._exited)
                if number not in self._replies:
                    raise HostFailure(f"the host {self._exit_text()}; see its log")
                reply = self._replies.pop(number)
        for refusal in ("failed", "refused"):
            if refusal in reply:
                raise HostFailure(str(reply[refusal]))
        return reply

    def _exit_text(self) -> str:
        code = self._process.returncode
        return f"exited with status {code}" if code >= 0 else f"was killed by signal {-code}"

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # the host has exited; the wait for the reply reports it

    def stop(self) -> bool:
        """Stops the host; returns whether all requests finished within the exit timeout.

        In a fork of the process that started the host, does nothing.
        """
        if not self._is_owner:
            return True
        try:
            self._send({"stop": True})
            self._process.terminate()  # the host does not read commands while it loads models
            self._reader.join()
        finally:  # also after a second Ctrl-C
            self.kill()
        return self._process.returncode == 0

    def kill(self) -> None:
        """Kills the process and closes its sockets."""
        self._process.kill()
        self._reader.join()
        self._control.close()
        self._instances.close()
