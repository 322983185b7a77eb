"""What a frontend process knows of the core's state: models, API keys, traces."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable

import pytest

from host.errors import ErrorCode, HostError, permission_denied, unauthenticated
from host.frontend_processes import core_link, remote_state
from host.frontend_processes import frontend_messages as m
from host.frontend_processes.core_link import CoreLink
from host.frontend_processes.frontend_messages import encode_error
from host.frontend_processes.remote_state import RemoteKeys
from tests.unit.host.frontend_processes.core_thread import CoreThread

KNOWN, WRONG = b"Bearer known", b"Bearer wrong"


class Clock:
    """In place of the module `time`: stands still between changes of `now`, in seconds."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


def error_of(question: m.ToCore) -> m.WireError | None:
    """The core accepts one key, for all models but `secret`."""
    assert isinstance(question, m.Authorize)
    if question.authorization != KNOWN:
        return encode_error(unauthenticated("unknown API key"))
    if question.model == "secret":
        return encode_error(permission_denied("not this model"))
    return None


class Frontend:
    """The keys in a frontend process whose core can fall silent."""

    def __init__(self, core: CoreThread, link: CoreLink, patch: pytest.MonkeyPatch) -> None:
        self._core = core
        self._link = link
        self._patch = patch
        self.keys = RemoteKeys(link)

    def silence_core(self, silent: bool = True) -> None:
        self._core.silent = silent
        self._patch.setattr(core_link, "_ANSWER_SECONDS", 0.02 if silent else 10.0)

    def refusal(self, header: bytes, model: str = "") -> ErrorCode:
        """The code of the error; UNAVAILABLE for a question to a silent core."""
        with pytest.raises(HostError) as caught:
            self.keys.check(header, model)
        return caught.value.code


def run(
    core: CoreThread, patch: pytest.MonkeyPatch, test: Callable[[Frontend], Awaitable[None]]
) -> list[tuple[bytes, str]]:
    """Runs a test in the loop of the frontend; returns what the core was sent about keys."""
    core.error_of = error_of

    async def main() -> None:
        link = CoreLink(
            core.files.memory, core.events, ours, lambda _: None, lambda *_: None, lambda: None
        )
        frontend = Frontend(core, link, patch)
        await test(frontend)
        frontend.silence_core(False)
        link.ask_now(m.Authorize(1 << 20, KNOWN, "last"), 1 << 20)

    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with ours, theirs:
        asyncio.run(main())
    sent = [(one.authorization, one.model) for one in core.received if isinstance(one, m.Authorize)]
    assert sent.pop() == (KNOWN, "last")
    return sent


@pytest.mark.parametrize("header", [b"", b"Bearer", b"known", b"Basic %", b"Digest known"])
def test_a_header_without_a_key_is_refused_while_the_core_is_silent(
    core: CoreThread, monkeypatch: pytest.MonkeyPatch, header: bytes
) -> None:
    async def test(frontend: Frontend) -> None:
        frontend.silence_core()
        assert frontend.refusal(header) is ErrorCode.UNAUTHENTICATED

    sent = run(core, monkeypatch, test)
    assert sent == [(b"", "")]  # the core counts it


@pytest.mark.parametrize(
    ("header", "model", "code"),
    [(WRONG, "", ErrorCode.UNAUTHENTICATED), (KNOWN, "secret", ErrorCode.PERMISSION_DENIED)],
)
def test_a_refusal_holds_for_a_second_without_the_core(
    core: CoreThread,
    monkeypatch: pytest.MonkeyPatch,
    header: bytes,
    model: str,
    code: ErrorCode,
) -> None:
    clock = Clock()
    monkeypatch.setattr(remote_state, "time", clock)

    async def test(frontend: Frontend) -> None:
        assert frontend.refusal(header, model) is code
        frontend.silence_core()
        assert frontend.refusal(header, model) is code
        clock.now += 1.0
        assert frontend.refusal(header, model) is ErrorCode.UNAVAILABLE
        frontend.silence_core(False)
        assert frontend.refusal(header, model) is code
        frontend.keys.check(KNOWN, "other")

    sent = run(core, monkeypatch, test)
    assert sent == [(header, model)] * 4 + [(KNOWN, "other")]


def test_few_and_short_refusals_are_remembered(
    core: CoreThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_state, "_MAX_ENTRIES", 2)
    long = b"Bearer " + bytes(2000)

    async def test(frontend: Frontend) -> None:
        for header in (WRONG, b"Bearer 2", b"Bearer 3", long):
            assert frontend.refusal(header) is ErrorCode.UNAUTHENTICATED
        frontend.silence_core()
        assert frontend.refusal(b"Bearer 3") is ErrorCode.UNAUTHENTICATED
        assert frontend.refusal(WRONG) is ErrorCode.UNAVAILABLE
        assert frontend.refusal(long) is ErrorCode.UNAVAILABLE

    run(core, monkeypatch, test)
