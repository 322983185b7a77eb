"""Calls of a model to the host: model control, metrics, log lines."""

from __future__ import annotations

import asyncio
import contextvars
import gc
import threading
from concurrent.futures import Future
from functools import partial
from typing import Any

import pytest

import pb_utils
from stub.wire import messages as m
from tests.conftest import DEADLINE
from tests.unit.stub.host_peer import INSTANCE, StartStub, output_value, response, wire_request
from tests.unit.stub.test_bls import start_thread

Requests = list[pb_utils.InferenceRequest]
Responses = list[pb_utils.InferenceResponse]

CALL_FAILED = f"Failed to process the request for model '{INSTANCE}', message: "


@pytest.mark.parametrize("ready", [True, False])
def test_the_model_gets_the_readiness_that_the_host_replies(
    start_stub: StartStub, ready: bool
) -> None:
    host = start_stub(lambda _: [response(int(pb_utils.is_model_ready("other", "2")))])
    host.send_batch(wire_request(0))
    call = host.receive(m.IsModelReady)
    assert (call.name, call.version) == ("other", "2")
    host.send_service(m.HostReply(call.number, None, ready))
    assert output_value(host.receive(m.Response)) == int(ready)


def test_load_and_unload_send_their_arguments_and_wait_for_the_reply(
    start_stub: StartStub,
) -> None:
    def execute(requests: Requests) -> Responses:
        pb_utils.load_model("other", '{"backend": "python"}', {"file:1/model.py": b"pass"})
        pb_utils.unload_model("other", True)
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    load = host.receive(m.LoadModel)
    assert (load.name, load.config) == ("other", '{"backend": "python"}')
    assert load.files == {"1/model.py": b"pass"}
    host.drain_service_messages()
    assert host.received(m.UnloadModel) == []  # the model still waits
    host.send_service(m.HostReply(load.number, None))
    unload = host.receive(m.UnloadModel)
    assert (unload.name, unload.dependents) == ("other", True)
    host.send_service(m.HostReply(unload.number, None))
    assert output_value(host.receive(m.Response)) == 1


def test_an_error_of_the_host_is_an_exception_with_the_instance_name(
    start_stub: StartStub,
) -> None:
    errors: list[str] = []

    def execute(requests: Requests) -> Responses:
        with pytest.raises(pb_utils.TritonModelException) as caught:
            pb_utils.load_model("other")
        errors.append(str(caught.value))
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    host.send_service(m.HostReply(host.receive(m.LoadModel).number, "no such model"))
    assert output_value(host.receive(m.Response)) == 1
    assert errors == [f"Failed to load model: {CALL_FAILED}no such model"]


def test_a_call_that_waits_when_the_host_ends_raises(start_stub: StartStub) -> None:
    result: Future[str] = Future()

    def call() -> None:
        try:
            result.set_result(str(pb_utils.is_model_ready("other")))
        except pb_utils.TritonModelException as error:
            result.set_result(str(error))

    def execute(requests: Requests) -> Responses:
        context = contextvars.copy_context()
        threading.Thread(target=context.run, args=(call,), daemon=True).start()
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    host.receive(m.IsModelReady)
    host.end_host()
    assert result.result(DEADLINE).endswith(f"{CALL_FAILED}the host has ended")
    host.wait_for_end()


def test_metrics_are_created_changed_read_and_dropped_by_number(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> Responses:
        family = pb_utils.MetricFamily("jobs", "All jobs", pb_utils.MetricFamily.GAUGE)
        metric = family.Metric(labels={"kind": "big"})
        metric.increment(2)
        metric.set(7.5)
        value = int(metric.value() * 2)
        del metric, family
        gc.collect()
        return [response(value)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    family = host.receive(m.NewMetricFamily)
    assert (family.name, family.description) == ("jobs", "All jobs")
    assert family.kind == int(pb_utils.MetricFamily.GAUGE)
    host.send_service(m.HostReply(family.number, None))
    metric = host.receive(m.NewMetric)
    assert (metric.family, metric.labels) == (family.family, {"kind": "big"})
    host.send_service(m.HostReply(metric.number, None))
    read = host.receive(m.ReadMetric)
    changes = [(change.operation, change.value) for change in host.received(m.ChangeMetric)]
    assert changes == [("increment", 2.0), ("set", 7.5)]
    assert read.metric == metric.metric != family.family
    host.send_service(m.HostReply(read.number, None, 7.5))
    assert output_value(host.receive(m.Response)) == 15
    families: list[int] = []
    metrics: list[int] = []
    while not (families and metrics):
        dropped = host.receive(m.DropMetrics)
        families += dropped.families
        metrics += dropped.metrics
    assert (families, metrics) == ([family.family], [metric.metric])


def test_a_family_is_dropped_before_it_is_created_again(start_stub: StartStub) -> None:
    rounds = 300

    def execute(requests: Requests) -> Responses:
        for _ in range(rounds):
            pb_utils.MetricFamily("jobs", "All jobs", pb_utils.MetricFamily.GAUGE)
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    dropped: list[int] = []
    created: list[int] = []
    while len(created) < rounds:
        for message in host.receive_frame():
            if isinstance(message, m.DropMetrics):
                dropped += message.families
            elif isinstance(message, m.NewMetricFamily):
                assert dropped == created
                created.append(message.family)
                host.send_service(m.HostReply(message.number, None))
    host.receive(m.BatchDone)


def test_a_family_is_dropped_although_the_next_call_cannot_be_encoded(
    start_stub: StartStub,
) -> None:
    rounds = 20

    def execute(requests: Requests) -> Responses:
        kept = pb_utils.MetricFamily("kept", "", pb_utils.MetricFamily.GAUGE)
        for _ in range(rounds):
            pb_utils.MetricFamily("jobs", "All jobs", pb_utils.MetricFamily.GAUGE)
            with pytest.raises(UnicodeEncodeError):
                kept.Metric({"label": "\ud800"})
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    created: list[int] = []
    for _ in range(rounds + 1):
        family = host.receive(m.NewMetricFamily)
        created.append(family.family)
        host.send_service(m.HostReply(family.number, None))
    host.receive(m.BatchDone)
    dropped: list[int] = []
    while sorted(dropped) != created:  # `kept` is dropped when `execute` returns
        dropped += host.receive(m.DropMetrics).families


def test_log_lines_carry_their_level_place_and_batch(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> Responses:
        pb_utils.Logger.log_info("a")
        pb_utils.Logger.log_warn("b")
        pb_utils.Logger.log_error("c")
        pb_utils.Logger.log_verbose("d")
        return [response(1)]

    host = start_stub(execute)
    _, done = host.run_batch(wire_request(0))
    lines = host.received(m.LogLine)
    assert [(line.level, line.text) for line in lines] == [(0, "a"), (1, "b"), (2, "c"), (3, "d")]
    assert {(line.file, line.batch) for line in lines} == {("test_host_calls.py", done.batch)}
    assert [line.line - lines[0].line for line in lines] == [0, 1, 2, 3]


def test_log_lines_of_a_level_that_is_off_are_not_sent(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> Responses:
        pb_utils.Logger.log_info("a")
        pb_utils.Logger.log_error("c")
        return [response(1)]

    host = start_stub(execute)
    for levels, sent in ((0b0001, ["a"]), (0b0100, ["c"]), (0, []), (0b1111, ["a", "c"])):
        host.set_log_levels(levels)
        host.run_batch(wire_request(0))
        assert [line.text for line in host.received(m.LogLine)] == sent


def test_a_long_log_line_is_cut(start_stub: StartStub) -> None:
    def execute(requests: Requests) -> Responses:
        pb_utils.Logger.log_info("a" * 65_540)
        return [response(1)]

    host = start_stub(execute)
    host.run_batch(wire_request(0))
    (line,) = host.received(m.LogLine)
    assert line.text == "a" * 65_536 + "... (4 more characters)"


def test_log_lines_over_the_budget_are_dropped_and_counted(start_stub: StartStub) -> None:
    """The lines have 250 MiB, for which the budget needs more than four minutes."""
    text, logged = "x" * 65_536, 4000

    def execute(requests: Requests) -> Responses:
        for _ in range(logged):
            pb_utils.Logger.log_info(text)
        return [response(1)]

    host = start_stub(execute)
    host.run_batch(wire_request(0))
    host.finalize()
    lines = host.received(m.LogLine)
    reports = [line for line in lines if line.text != text]
    assert {line.level for line in reports} == {1}
    dropped = sum(int(line.text.split()[1]) for line in reports)
    assert dropped > 0
    assert len(lines) - len(reports) + dropped == logged


def test_replies_reach_the_threads_whose_calls_they_answer(start_stub: StartStub) -> None:
    results: list[bool] = []

    def execute(requests: Requests) -> Responses:
        calls = [start_thread(partial(pb_utils.is_model_ready, name)) for name in ("a", "b", "c")]
        results.extend(call.result(DEADLINE) for call in calls)
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    calls = [host.receive(m.IsModelReady) for _ in range(3)]
    for call in (calls[1], calls[0], calls[2]):
        host.send_service(m.HostReply(call.number, None, call.name == "b"))
    host.receive(m.BatchDone)
    assert results == [False, True, False]


def test_a_label_that_is_not_text_is_refused_without_a_message(start_stub: StartStub) -> None:
    errors: list[str] = []
    labels: Any = {"number": 1}

    def execute(requests: Requests) -> Responses:
        family = pb_utils.MetricFamily("jobs", "", pb_utils.MetricFamily.COUNTER)
        try:
            family.Metric(labels)
        except pb_utils.TritonModelException as error:
            errors.append(str(error))
        return [response(1)]

    host = start_stub(execute)
    host.send_batch(wire_request(0))
    host.send_service(m.HostReply(host.receive(m.NewMetricFamily).number, None))
    host.receive(m.BatchDone)
    assert errors == [
        f"Error when creating Metric: {CALL_FAILED}attempt to access JSON non-string as string"
    ]
    assert host.received(m.NewMetric) == []


def test_a_coroutine_logs_with_the_number_of_its_batch(start_stub: StartStub) -> None:
    async def log(text: str) -> None:
        pb_utils.Logger.log_info(text)

    async def execute(requests: Requests) -> Responses:
        pb_utils.Logger.log_info("coroutine")
        await asyncio.create_task(log("task"))
        await asyncio.to_thread(pb_utils.Logger.log_info, "thread of the event loop")
        return [response(1)]

    host = start_stub(execute, max_concurrent_batches=2)
    for batch in (1, 2):
        host.send_batch(wire_request(0))
        assert host.receive(m.BatchDone).batch == batch
        assert [(line.text, line.batch) for line in host.received(m.LogLine)] == [
            ("coroutine", batch),
            ("task", batch),
            ("thread of the event loop", batch),
        ]
