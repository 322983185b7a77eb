"""Instances that are threads of a user's process: what happens after they end."""

from __future__ import annotations

import gc
import sys
import weakref
from pathlib import Path
from typing import Any

import pytest

import pb_utils
from stub.wire import messages as m
from tests.descriptors import descriptors
from tests.unit.stub.host_peer import Model, StartStub, Stubs, response, wire_request

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


class KeepFamily(Model):
    """A model that keeps a metric family."""

    def __init__(self) -> None:
        self.families: list[pb_utils.MetricFamily] = []

    def execute(self, requests: Requests) -> list[pb_utils.InferenceResponse]:
        """Creates a family."""
        self.families.append(pb_utils.MetricFamily("jobs", "", pb_utils.MetricFamily.COUNTER))
        self.metric = self.families[0].Metric()
        return [response(1)]


def test_a_kept_metric_family_keeps_no_descriptor_of_its_ended_instance(
    tmp_path: Path,
) -> None:
    gc.collect()  # descriptors of earlier tests
    before = descriptors()
    model = KeepFamily()
    stubs = Stubs(tmp_path)
    host = stubs.start(model)
    host.send_batch(wire_request(1))
    host.send_service(m.HostReply(host.receive(m.NewMetricFamily).number, None))
    host.send_service(m.HostReply(host.receive(m.NewMetric).number, None))
    host.receive(m.BatchDone)
    host.finalize()
    stubs.close()
    del host
    gc.collect()
    assert descriptors() - before == set()
    model.metric.increment(1)  # does nothing, as before the runtime is freed
    with pytest.raises(pb_utils.TritonModelException, match="its model instance has ended"):
        model.metric.value()
