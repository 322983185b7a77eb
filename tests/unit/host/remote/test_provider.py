"""The interface to the servers of remote models, and limits on what they send."""

from __future__ import annotations

from host.inference.call import Call
from host.inference.request import InferRequest
from host.remote.provider import ReturningCalls


def call_for(*ancestors: str, age_s: float = 5.0) -> Call:
    """A call of another server that arrived so long ago."""
    call = Call(InferRequest("model", [], ancestors=ancestors))
    call.received_ns -= int(age_s * 1e9)
    return call


def test_a_call_waits_for_those_that_were_made_for_it() -> None:
    returning = ReturningCalls()
    first, second = returning.add_outgoing(), returning.add_outgoing()
    call = call_for("another server's", first, second)
    with returning.incoming(call), returning.incoming(call_for("another server's")):
        assert returning.made_for(first) == returning.made_for(second) == [call]
        returning.remove_outgoing(first)
        assert returning.made_for(first) == []
    assert returning.made_for(second) == []


def test_a_call_that_came_just_now_may_not_be_waited_for() -> None:
    returning = ReturningCalls()
    outgoing = returning.add_outgoing()
    with returning.incoming(call_for(outgoing, age_s=0)):
        assert returning.made_for(outgoing) == []


def test_ids_of_several_servers_differ() -> None:
    assert ReturningCalls().add_outgoing() != ReturningCalls().add_outgoing()
