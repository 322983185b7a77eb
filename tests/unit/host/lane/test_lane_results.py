"""Results of batches that the compiled lane decodes are those that Python decodes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from host.instances import stub_session
from host.lane import results_reader, state
from stub.wire import messages as m
from stub.wire.messages import WireError, WireResponse, WireTensor
from tests.conftest import ALL
from tests.fuzz.frames_target import read_in_lane
from tests.unit.host.instances.test_stub_session import Tracked, done, output
from tests.unit.host.lane.test_lane import DAMAGE, damaged
from tests.unit.host.stub_peer import PeerLauncher, stub_pool

pytestmark = pytest.mark.skipif(results_reader is None, reason=f"the compiled lane is {state}")


NUMBERS = st.sampled_from([1, 1, 1, 1, 0, 127, 128, 255, 256, 65_536, 1 << 32, (1 << 63) - 1])
TEXTS = st.sampled_from(["OUTPUT0", "", "é漢", "n" * 31, "n" * 32, "n" * 255, "n" * 256, "\0"])
TENSORS = st.builds(
    WireTensor,
    TEXTS,
    st.integers(1, 14) | st.sampled_from([0, 11, 15, 300, -1]),
    st.lists(NUMBERS | st.sampled_from([-1, 1 << 63]), max_size=3)
    | st.just([1] * 15)
    | st.just([1] * 16),
    st.sampled_from([b"", b"x", bytes(64), bytes(255), bytes(256), bytes(65_535), bytes(65_536)])
    | st.none(),
    st.sampled_from([0, 0, 0, 0, 0, 3]),
)
RESPONSES = st.builds(
    WireResponse,
    st.lists(TENSORS, max_size=2),
    st.sampled_from([{}, {}, {}, {}, {"p": 1}]),
    st.none() | st.none() | st.just(WireError(1, "no")),
)
TIMES = st.sampled_from([(10, 11, 13, 16), (1, 1, 1, 1), (10**14, 10**14 + 1, 10**14 + 2, 1 << 62)])


@st.composite
def frames(draw: Any) -> bytes:
    rarely = st.sampled_from([False] * 15 + [True])
    number = draw(NUMBERS)
    messages: list[m.ToHost] = []
    for index in range(draw(st.sampled_from([0, 1, 1, 2, 3, 15, 16]))):
        response = draw(RESPONSES) if index < 3 else output()
        place = draw(NUMBERS) if draw(rarely) else index
        batch = draw(NUMBERS) if draw(rarely) else number
        messages.append(
            m.Response(batch, place, None if draw(rarely) else response, not draw(rarely))
        )
    if draw(rarely):
        messages.append(m.LogLine(1, "", 0, "text"))
    times = draw(st.permutations(range(4))) if draw(rarely) else draw(TIMES)
    end = m.BatchDone(number, *times)
    if draw(rarely):
        end.failure = "no"
    if draw(rarely):
        end.deferred = (0,)
    if draw(rarely):
        end.rescheduled = (0,)
    return m.encode([*messages, end])


@given(frames(), st.lists(DAMAGE, max_size=3))
@settings(max_examples=10_000 if ALL else 200, deadline=None)
def test_results_are_equal(frame: bytes, damages: Sequence[Any]) -> None:
    for damage in damages:
        frame = damaged(frame, damage)
    read_in_lane(frame)


USUAL = m.encode(
    [
        *(m.Response(300, index, output(b"value")) for index in range(2)),
        m.BatchDone(300, 10**14, 10**14, 10**14 + 1, 10**14 + 2),
    ]
)


def test_usual_results_are_taken() -> None:
    assert read_in_lane(USUAL) is not None
    several = WireResponse([WireTensor("x", 11, [2, 300], bytes(2_400)), *output().outputs], {})
    messages = [m.Response(7, index, several) for index in range(40)]
    assert read_in_lane(m.encode([*messages, m.BatchDone(7, 1, 2, 3, 4)])) is not None
    assert read_in_lane(
        m.encode([m.Response(7, 0, WireResponse([], {})), m.BatchDone(7, 1, 2, 3, 4)])
    )


def test_usual_results_that_are_cut_or_have_a_changed_byte_are_equal() -> None:
    for place in range(len(USUAL)):
        assert read_in_lane(USUAL[:place]) is None
        for change in (0, 1, 0x7F, 0x80, 0x90, 0xC0, 0xCF, 0xDC, 0xFF):
            read_in_lane(USUAL[:place] + bytes((change,)) + USUAL[place + 1 :])
    assert read_in_lane(USUAL + b"\0") is None


@pytest.mark.parametrize(
    "messages",
    [
        [],
        [m.Hello()],
        [m.BatchDone(1, 1, 2, 3, 4)],
        [m.Response(1, 0, output())],
        [m.Response(1, 0, output(), False), m.BatchDone(1, 1, 2, 3, 4)],
        [m.Response(1, 0, None), m.BatchDone(1, 1, 2, 3, 4)],
        [m.Response(1, 0, WireResponse([], {"p": 1})), m.BatchDone(1, 1, 2, 3, 4)],
        [m.Response(1, 0, WireResponse([], {}, WireError(1, "")))],
        [m.Response(1, 0, output()), m.BatchDone(1, 0, 0, 0, 0)],
        [m.Response(1, 0, output()), m.BatchDone(1, 4, 3, 2, 1)],
        [m.Response(1, 1, output()), m.Response(1, 0, output()), m.BatchDone(1, 1, 2, 3, 4)],
    ],
)
def test_unusual_results_are_left_to_python(messages: list[m.ToHost]) -> None:
    assert read_in_lane(m.encode(messages)) is None


SESSIONS: dict[str, list[list[m.ToHost]]] = {
    "usual": [[m.Response(1, 0, output(b"a")), m.Response(1, 1, output(b"b")), done(1)]],
    "too few": [[m.Response(1, 0, output(b"a")), done(1)]],
    "too many": [[*(m.Response(1, index, output()) for index in range(3)), done(1)]],
    "unknown": [[m.Response(9, 0, output()), m.Response(9, 1, output()), done(9)]],
    "again": [[m.Response(1, 0, output()), m.Response(1, 1, output()), done(1)]] * 2,
    "answered": [
        [m.Response(1, 1, output())],
        [m.Response(1, 0, output()), m.Response(1, 1, output()), done(1)],
    ],
    "deferred": [
        [m.Response(1, 0, output()), done(1, deferred=(1,))],
        [m.Response(1, 0, output()), m.Response(1, 1, output()), done(1)],
    ],
    "released": [
        [m.InstanceReleased(1)],
        [m.Response(1, 0, output(b"a")), m.Response(1, 1, output(b"b")), done(1)],
    ],
    "damaged": [[m.Response(1, 0, output()), m.Response(1, 1, WireResponse([], {})), done(1)]],
}


def effects(frames: Sequence[bytes]) -> list[object]:
    """What a session does with frames while it runs one batch of two requests."""
    found: list[object] = []

    async def main() -> None:
        async with stub_pool(PeerLauncher()) as pool:
            t = Tracked(pool)
            batch, calls = t.batch("a", "b")
            for frame in frames:
                t.session.handle_frames([frame])
            found.extend([t.responses, t.events, t.logged, t.sent, list(map(repr, t.faults))])
            found.extend([batch.times, batch.answered, t.session.idle, t.failures])
            found.extend((call.state, call.failed) for call in calls)
            t.session.link.close()
            t.session.transfer.process_exited()

    asyncio.run(main())
    return found


@pytest.mark.parametrize("name", SESSIONS)
def test_sessions_are_equal(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    frames = [m.encode(messages) for messages in SESSIONS[name]]
    if name == "damaged":
        frames = [frames[0][:-1] + b"\xc1"]
    lane = effects(frames)
    monkeypatch.setattr(stub_session, "_lane", None)
    assert msgspec.to_builtins(lane, enc_hook=repr) == msgspec.to_builtins(
        effects(frames), enc_hook=repr
    )
