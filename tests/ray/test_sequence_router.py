"""The router of sequences, as Ray Serve calls it; no cluster is needed."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from types import SimpleNamespace

import pytest

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


@pytest.mark.parametrize("session", ["", "known"])
def test_a_request_that_no_replica_takes_pauses(session: str) -> None:
    from host.ray.sequence_router import SequenceRouter

    replicas = [SimpleNamespace(replica_id=name) for name in ("one", "other")]

    class Router(SequenceRouter):
        """Knows replicas, and the one of a sequence, without a cluster."""

        curr_replicas = {replica.replica_id: replica for replica in replicas}

        def __init__(self) -> None:
            self._replica_of = OrderedDict(known="other")

    request = SimpleNamespace(
        metadata=SimpleNamespace(session_id=session, call_method="ModelReady"),
        routing_context=SimpleNamespace(should_backoff=False),
    )
    (chosen,) = asyncio.run(Router().choose_replicas(list(replicas), request))
    assert request.routing_context.should_backoff
    assert [one.replica_id for one in chosen] == ["other"] if session else len(chosen) == 2
