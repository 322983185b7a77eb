"""The host as a process of the caller's: started, told what to serve, watched, ended."""

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
    """A running host, which serves nothing yet. `on_exit` is called, by a thread, when it ends.

    Raises HostFailure.
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
                start_new_session=True,  # a Ctrl-C at the terminal is for the caller
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
        self._replies: dict[int, Mapping[str, Any]] = {}  # by the number of what was asked
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
        """Whether it has not ended. A fork of this process has no host."""
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
            pass  # it has ended without closing its end
        self._process.wait()
        with self._reply_received:
            self._exited = True
            self._reply_received.notify_all()
        self._on_exit()

    def bind(self, spec: ModelSpec) -> None:
        """Have it serve a model, now or from the start. Raises HostFailure."""
        self._request({"bind": spec.model_config(), "version": int(spec.version)})

    def serve(self) -> list[int]:
        """Load what is bound and open the ports; those of gRPC, HTTP and metrics.

        Raises HostFailure.
        """
        ports: list[int] = self._request({"serve": True})["serving"]
        return ports

    def _request(self, command: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its answer: it always has one, or ends."""
        if not self._is_owner:
            raise HostFailure(
                f"this host is the one of process {self._owner_pid}, of which this one is a fork"
            )
        with self._request_lock:
            self._request_count += 1
            number = (
                self._request_count
            )  # a Ctrl-C leaves an answer behind, which is not the next one's
            self._send({**command, "number": number})
            with self._reply_received:
                self._reply_received.wait_for(lambda: number in self._replies or self._exited)
                if number not in self._replies:
                    raise HostFailure(f"the host has ended {self._exit_text()}; its log says why")
                reply = self._replies.pop(number)
        for refusal in ("failed", "refused"):
            if refusal in reply:
                raise HostFailure(str(reply[refusal]))
        return reply

    def _exit_text(self) -> str:
        code = self._process.returncode
        return f"with status {code}" if code >= 0 else f"by signal {-code}"

    def _send(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it has ended, which is noticed where its answer is waited for

    def stop(self) -> bool:
        """Let it finish what runs, and end; whether all did within the exit timeout.

        In a fork of the process that started it, it is left alone.
        """
        if not self._is_owner:
            return True
        try:
            self._send({"stop": True})
            self._process.terminate()  # it may be loading, and then does not listen
            self._reader.join()
        finally:  # also if Ctrl-C strikes again
            self.kill()
        return self._process.returncode == 0

    def kill(self) -> None:
        """End it now, and give everything back."""
        self._process.kill()
        self._reader.join()
        self._control.close()
        self._instances.close()
