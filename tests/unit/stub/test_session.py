"""The table of allowed messages: which it accepts and refuses, and that both ends agree."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stub.wire import messages as m
from stub.wire.session import ALWAYS_ALLOWED, TRANSITIONS, ProtocolError, Session, State
from tests.unit.stub.samples import ALL

MESSAGES_TO_REACH: dict[State, list[type]] = {
    State.CONNECTING: [],
    State.IDLE: [m.Hello],
    State.AUTO_COMPLETING: [m.Hello, m.AutoComplete],
    State.AUTO_COMPLETED: [m.Hello, m.AutoComplete, m.AutoCompleted],
    State.INITIALIZING: [m.Hello, m.Initialize],
    State.SERVING: [m.Hello, m.Initialize, m.Initialized],
    State.FINALIZING: [m.Hello, m.Finalize],
    State.ENDED: [m.Hello, m.Finalize, m.Finalized],
    State.ERROR: [],
}
"""The messages that lead to each state."""


def session_in(state: State) -> Session:
    session = Session()
    for kind in MESSAGES_TO_REACH[state]:
        session.advance(ALL[kind])
    if state is State.ERROR:
        with pytest.raises(ProtocolError):
            session.advance(m.Initialized())
    assert session.state is state
    return session


def allowed(state: State, kind: type) -> bool:
    return kind in TRANSITIONS[state] or (kind in ALWAYS_ALLOWED and state is not State.ERROR)


LEGAL = [(state, kind) for state in State for kind in ALL if allowed(state, kind)]
ILLEGAL = [(state, kind) for state in State for kind in ALL if not allowed(state, kind)]


def test_every_state_is_reachable_and_every_message_is_allowed_somewhere() -> None:
    assert set(MESSAGES_TO_REACH) == set(TRANSITIONS) == set(State)
    assert {kind for _, kind in LEGAL} == set(ALL)
    reached = {following for moves in TRANSITIONS.values() for following in moves.values()}
    assert reached == set(State) - {State.CONNECTING, State.ERROR}


@pytest.mark.parametrize(("state", "kind"), LEGAL)
def test_a_legal_message_leads_to_the_state_of_the_table(state: State, kind: type) -> None:
    session = session_in(state)
    session.advance(ALL[kind])
    assert session.state is TRANSITIONS[state].get(kind, state)


@pytest.mark.parametrize(("state", "kind"), ILLEGAL)
def test_an_illegal_message_ends_the_session_for_good(state: State, kind: type) -> None:
    session = session_in(state)
    with pytest.raises(ProtocolError, match=f"{kind.__name__} is not allowed while {state.value}"):
        session.advance(ALL[kind])
    for message in ALL.values():
        assert session.state is State.ERROR
        with pytest.raises(ProtocolError, match="while error"):
            session.advance(message)


@pytest.mark.parametrize("kind", [m.Execute, m.Initialize, m.AutoComplete, m.Finalize])
def test_a_finalizing_stub_gets_no_new_work(kind: type) -> None:
    for state in (State.FINALIZING, State.ENDED):
        assert not allowed(state, kind)


TO_STUB_KINDS = {
    m.AutoComplete,
    m.Initialize,
    m.Execute,
    m.BlsResponse,
    m.CancelRequest,
    m.Finalize,
}


@given(st.lists(st.sampled_from(sorted(ALL, key=lambda kind: kind.__name__)), max_size=60))
def test_both_ends_of_a_legal_conversation_agree(kinds: list[type]) -> None:
    """Each message is registered by its sender, then by its receiver, before the next one."""
    host, stub = Session(), Session()
    for kind in kinds:
        if not allowed(host.state, kind):
            continue
        first, second = (host, stub) if kind in TO_STUB_KINDS else (stub, host)
        first.advance(ALL[kind])
        second.advance(ALL[kind])
        assert host.state is stub.state is not State.ERROR


@given(st.data())
def test_messages_that_cross_on_the_wire_are_legal_at_both_ends(data: st.DataObject) -> None:
    """While serving, each end sends without waiting for the other, until the stub is finalized."""
    host, stub = session_in(State.SERVING), session_in(State.SERVING)
    to_host: list[type] = []
    to_stub: list[type] = []
    # A response or a cancellation follows a message that the stub has sent.
    from_stub: list[type] = [m.Response, m.BatchDone, m.BlsRequest, m.LogLine, m.BlockRelease]
    from_host: list[type] = [
        m.Execute,
        m.BlsResponse,
        m.CancelRequest,
        m.BlockRelease,
        m.OpenArena,
        m.CloseArena,
    ]
    for _ in range(data.draw(st.integers(0, 30))):
        step = data.draw(
            st.sampled_from(["stub sends", "host sends", "host receives", "stub receives"])
        )
        if step == "stub sends":
            kind = data.draw(st.sampled_from(from_stub))
            stub.advance(ALL[kind])
            to_host.append(kind)
        elif step == "host sends":
            kind = data.draw(st.sampled_from(from_host))
            host.advance(ALL[kind])
            to_stub.append(kind)
        elif step == "host receives" and to_host:
            host.advance(ALL[to_host.pop(0)])
        elif step == "stub receives" and to_stub:
            stub.advance(ALL[to_stub.pop(0)])
    host.advance(m.Finalize())
    for late in to_host:
        host.advance(ALL[late])
    for late in [*to_stub, m.Finalize]:
        stub.advance(ALL[late])
    stub.advance(m.Finalized(None))
    host.advance(m.Finalized(None))
    assert host.state is stub.state is State.ENDED
