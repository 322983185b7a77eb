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
from stub.threads import Take, ThreadServer

_ENTRY = str(Path(__file__).resolve().parents[1] / "cli" / "bound.py")


class Child:
    """A running host, which serves nothing yet. `ended` is called, by a thread, when it ends.

    Raises HostFailure.
    """

    def __init__(self, flags: Sequence[str], take: Take, ended: Callable[[], None]) -> None:
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
        self._caller = os.getpid()
        self._ended = ended
        self._control = ours
        self._asked = 0
        self._news: dict[int, Mapping[str, Any]] = {}  # by the number of what was asked
        self._changed = threading.Condition()
        self._asking = threading.Lock()
        self._over = False
        self._instances = ThreadServer(launches, take)
        self._reader = threading.Thread(target=self._read, name="pbhost-control", daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        """Whether it has not ended. A fork of this process has no host."""
        return not self._over and self._ours

    @property
    def _ours(self) -> bool:
        return os.getpid() == self._caller

    def _read(self) -> None:
        try:
            with self._control.makefile("r", encoding="utf-8") as lines:
                for line in lines:
                    news = json.loads(line)
                    with self._changed:
                        self._news[news["to"]] = news
                        self._changed.notify_all()
        except OSError:
            pass  # it has ended without closing its end
        self._process.wait()
        with self._changed:
            self._over = True
            self._changed.notify_all()
        self._ended()

    def bind(self, spec: ModelSpec) -> None:
        """Have it serve a model, now or from the start. Raises HostFailure."""
        self._ask({"bind": spec.model_config(), "version": int(spec.version)})

    def serve(self) -> list[int]:
        """Load what is bound and open the ports; those of gRPC, HTTP and metrics.

        Raises HostFailure.
        """
        ports: list[int] = self._ask({"serve": True})["serving"]
        return ports

    def _ask(self, question: Mapping[str, Any]) -> Mapping[str, Any]:
        """Its answer: it always has one, or ends."""
        if not self._ours:
            raise HostFailure(
                f"this host is the one of process {self._caller}, of which this one is a fork"
            )
        with self._asking:
            self._asked += 1
            number = self._asked  # a Ctrl-C leaves an answer behind, which is not the next one's
            self._say({**question, "number": number})
            with self._changed:
                self._changed.wait_for(lambda: number in self._news or self._over)
                if number not in self._news:
                    raise HostFailure(f"the host has ended {self._how()}; its log says why")
                news = self._news.pop(number)
        for refusal in ("failed", "refused"):
            if refusal in news:
                raise HostFailure(str(news[refusal]))
        return news

    def _how(self) -> str:
        code = self._process.returncode
        return f"with status {code}" if code >= 0 else f"by signal {-code}"

    def _say(self, message: Mapping[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            pass  # it has ended, which is noticed where its answer is waited for

    def stop(self) -> bool:
        """Let it finish what runs, and end; whether all did within the exit timeout.

        In a fork of the process that started it, it is left alone.
        """
        if not self._ours:
            return True
        try:
            self._say({"stop": True})
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
