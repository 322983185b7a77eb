"""Instances that are threads of a user's process: what happens after they end."""

from __future__ import annotations

import gc
import sys
import weakref
from typing import Any

import pytest

import pb_utils
from tests.unit.stub.host_peer import Model, StartStub, wire_request

Requests = list[pb_utils.InferenceRequest]


class KeepSender(Model):
    """A model that keeps the sender of its request, and ends no request."""

    def __init__(self) -> None:
        self.senders: list[object] = []

    def execute(self, requests: Requests) -> None:
        """Keeps the senders."""
        self.senders += [request.get_response_sender() for request in requests]


def test_a_sender_that_is_freed_together_with_its_worker_writes_to_no_closed_descriptor(
    start_stub: StartStub, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are one garbage cycle: the worker closes its descriptors before the sender ends."""
    errors: list[Any] = []
    monkeypatch.setattr(sys, "unraisablehook", lambda failure: errors.append(failure.exc_value))
    model = KeepSender()
    host = start_stub(model)
    host.run_batch(wire_request(1))
    sender = weakref.ref(model.senders[0])
    gc.disable()  # the cycle is freed below
    try:
        host.end_host()
        host.wait_for_end()
        del host.model, model
        assert sender() is not None
    finally:
        gc.enable()
    gc.collect()
    assert sender() is None
    assert errors == []
