"""One request to an ensemble, step by step, with members that answer when they are told to."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

import pytest

from host.cache.responses import CacheHit
from host.config.pbtxt import parse_pbtxt
from host.config.schema import ModelConfig
from host.crashes.quarantine import Quarantine
from host.ensembles.ensemble import Ensemble
from host.errors import ErrorCode, HostError, internal
from host.inference.call import Call
from host.inference.request import InferRequest, InferResponse, Tensor, read_bytes
from host.metrics.latency import MetricsSettings
from host.metrics.model_metrics import ModelMetrics
from host.metrics.statistics import InferenceCounters
from host.models.registry import Extensions, LoadedModel, ModelVersion, Registry, VersionState
from tests.unit.host.call_parties import RecordingHolder

TENSOR = "data_type: TYPE_INT8, dims: [ 1 ] }"


class Member:
    """A model whose calls are answered by the test."""

    defines_is_ready = False
    ready = True
    in_flight = 0
    unfinished = 0
    in_use = False

    def __init__(self, name: str, decoupled: bool = False) -> None:
        self.name = name
        self.version = 1
        self.labels: Mapping[str, Sequence[str]] = {}
        self.extensions: Extensions = {}
        self.quarantine: Quarantine | None = None
        self.config: ModelConfig = parse_pbtxt(
            f'name: "{name}" input [ {{ name: "X", {TENSOR} ] output [ {{ name: "A", {TENSOR} ]'
            f" model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}",
            "config.pbtxt",
        )
        counters = InferenceCounters(name, "1")
        self.metrics = ModelMetrics(self.config, 1, counters, lambda: 0, MetricsSettings())
        self.calls: list[Call] = []
        self.taken: list[int] = []
        self.holder = RecordingHolder()
        self.held = 0
        self.refuses: HostError | None = None

    @property
    def cancelled(self) -> list[Call]:
        return self.holder.cancelled

    def repeat_cache_hit(self, hit: CacheHit) -> bool:
        return False

    def infer(self, request: InferRequest) -> Call:
        if self.refuses is not None:
            raise self.refuses
        call = Call(request)
        call.holder = self.holder
        call.on_response_acknowledged = lambda response: self.taken.append(
            read_bytes(response.outputs[0].data)[0]
        )
        self.calls.append(call)
        return call

    def answer(self, *values: int, index: int = -1, final: bool = True) -> None:
        """A response to a call; without values, only its end."""
        for value in values:
            response = InferResponse(self.name, 1)
            response.outputs = [Tensor("A", "INT8", [1], bytes([value]))]
            self.calls[index].respond(response, final)
        if not values:
            self.calls[index].respond(None)

    async def why_not_ready(self) -> str:
        return "" if self.ready else "it sleeps"

    def acquire(self) -> None:
        self.held += 1

    def release(self) -> None:
        self.held -= 1

    async def drain(self, sequences: bool = False) -> None:
        raise AssertionError

    def abort(self, error: HostError) -> None:
        raise AssertionError

    async def stop(self, grace: float, finalize: float) -> None:
        raise AssertionError


class Line:
    """An ensemble of members; each member takes the output of the previous one."""

    def __init__(self, *members: Member, scheduling: str = "") -> None:
        registry = Registry()
        for member in members:
            model: LoadedModel = member
            registry.set_version(member.name, ModelVersion(1, VersionState.READY, model=model))
        names = ["I", *(f"t{index}" for index in range(1, len(members))), "O"]
        steps = ", ".join(
            f'{{ model_name: "{member.name}" model_version: -1'
            f' input_map {{ key: "X" value: "{names[i]}" }}'
            f' output_map {{ key: "A" value: "{names[i + 1]}" }} }}'
            for i, member in enumerate(members)
        )
        decoupled = any(m.config.model_transaction_policy.decoupled for m in members)
        config = parse_pbtxt(
            f'name: "line" platform: "ensemble" input [ {{ name: "I", {TENSOR} ]'
            f' output [ {{ name: "O", {TENSOR} ]'
            f" model_transaction_policy {{ decoupled: {str(decoupled).lower()} }}"
            f" ensemble_scheduling {{ {scheduling} step [ {steps} ] }}",
            "config.pbtxt",
        )
        self.ensemble = Ensemble(config, 1, registry, lambda tensor: None)

    def send_request(self, **options: Any) -> tuple[Call, list[InferResponse | None]]:
        request = InferRequest("line", [Tensor("I", "INT8", [1], b"\1")], **options)
        call = self.ensemble.infer(request)
        answers: list[InferResponse | None] = []
        call.subscribe(lambda response, final: answers.append(response))
        return call, answers


def values(answers: Sequence[InferResponse | None]) -> list[int]:
    return [read_bytes(answer.outputs[0].data)[0] for answer in answers if answer is not None]


def test_a_member_gets_the_request_options_of_its_ensemble() -> None:
    member = Member("m")
    Line(member).send_request(
        id="r", parameters={"a": 1}, correlation_id=7, flags=3, priority=2, timeout_us=99
    )
    asked = member.calls[0].request
    assert (asked.id, asked.parameters, asked.correlation_id) == ("r", {"a": 1}, 7)
    assert (asked.flags, asked.priority, asked.timeout_us) == (3, 2, 99)
    assert (asked.model_name, asked.model_version) == ("m", 1)
    assert asked.requested_outputs == ["A"]


def test_an_ensemble_that_comes_to_no_output_says_so() -> None:
    member = Member("m")
    line = Line(member)
    call, answers = line.send_request(id="r")
    member.answer()
    assert call.finished and answers[0] is not None and answers[0].error is not None
    assert answers[0].error.code is ErrorCode.INVALID_ARG
    assert answers[0].error.message == (
        "in ensemble 'line', [request id: r] unexpected deadlock, at least one output is not set"
        " while no more ensemble steps can be made"
    )
    assert line.ensemble.counters.snapshot().inference_stats.fail.count == 2


def test_members_are_held_from_the_beginning_to_the_end() -> None:
    first, second = Member("first"), Member("second")
    call, answers = Line(first, second).send_request()
    assert first.held == second.held == 1
    first.answer(5)
    assert first.held == second.held == 1
    second.answer(6)
    assert call.finished and values(answers) == [6]
    assert first.held == second.held == 0


def test_a_member_that_refuses_a_request_fails_that_of_the_ensemble() -> None:
    first, second = Member("first"), Member("second")
    second.refuses = internal("it is too late")
    call, answers = Line(first, second).send_request()
    first.answer(5)
    assert answers[0] is not None and answers[0].error is not None
    assert answers[0].error.message == "in ensemble 'line', it is too late"
    assert call.finished and first.held == second.held == 0


def test_a_member_that_is_not_there_fails_the_request() -> None:
    member = Member("m")
    line = Line(member)
    line.ensemble._registry.set_version("m", ModelVersion(1, VersionState.UNLOADING, model=None))
    call, answers = line.send_request()
    assert answers[0] is not None and answers[0].error is not None
    assert answers[0].error.message == (
        "in ensemble 'line', Request for unknown model: 'm' has no available versions"
    )


def test_a_response_is_taken_once_those_after_it_are_done_with_it() -> None:
    """So a member is held up when its responses are not taken, and nothing piles up."""
    first, second = Member("first", decoupled=True), Member("second")
    call, answers = Line(first, second).send_request()
    first.answer(1, 2, final=False)
    assert len(second.calls) == 2
    assert first.taken == []
    second.answer(11, index=0)
    assert first.taken == [1]
    second.answer(12, index=1)
    assert first.taken == [1, 2]
    assert values(answers) == [11, 12]
    first.answer()
    assert call.finished and answers[-1] is None


def test_a_response_that_goes_out_is_taken_when_the_client_has_taken_it() -> None:
    member = Member("m", decoupled=True)
    call, answers = Line(member).send_request()
    member.answer(1, 2, final=False)
    assert values(answers) == [1, 2] and member.taken == []
    for answer in answers:
        assert answer is not None
        call.acknowledge_response(answer)
    assert member.taken == [1, 2]


def test_after_a_failure_a_member_may_send_on_to_its_end() -> None:
    first, second = Member("first", decoupled=True), Member("second")
    call, answers = Line(first, second).send_request()
    first.answer(1, 2, final=False)
    second.calls[0].fail(internal("no"))
    first.answer(3, final=False)
    assert first.taken == [1, 3]  # the second one is still being worked on
    assert not answers
    second.answer(12, index=1)
    assert first.taken == [1, 3, 2]
    first.answer()
    assert call.finished and answers[0] is not None and answers[0].error is not None
    assert answers[0].error.message == "in ensemble 'line', no"


def test_cancellation_reaches_the_members_and_nothing_more_is_started() -> None:
    first, second = Member("first", decoupled=True), Member("second")
    line = Line(first, second, scheduling="max_inflight_requests: 1")
    call, answers = line.send_request()

    async def work() -> None:
        first.answer(1, 2, final=False)  # the second one waits for its turn
        call.cancel()

    asyncio.run(work())
    assert first.cancelled == [first.calls[0]]
    assert second.cancelled == second.calls and len(second.calls) == 1
    assert answers[-1] is not None and answers[-1].error is not None
    assert answers[-1].error.code is ErrorCode.CANCELLED
    assert first.held == second.held == 0
    assert line.ensemble.counters.snapshot().inference_stats.fail.count == 1
    assert line.ensemble._limiter is not None and not line.ensemble._limiter._waiting[1]


def test_times_of_members_are_added_up_even_when_they_come_late() -> None:
    first, second = Member("first"), Member("second")
    line = Line(first, second)
    line.send_request()

    def computed(member: Member) -> None:
        tell = member.calls[0].on_computed
        assert tell is not None
        tell(1, 20, 300)

    computed(first)
    first.answer(1)
    second.answer(2)
    computed(second)  # its batch ends after its response
    spent = line.ensemble.counters.snapshot().inference_stats
    assert (spent.compute_input.ns, spent.compute_infer.ns, spent.compute_output.ns) == (
        2,
        40,
        600,
    )
    assert spent.compute_infer.count == spent.success.count == 1


def test_an_ensemble_is_ready_when_its_members_are() -> None:
    first, second = Member("first"), Member("second")
    ensemble = Line(first, second).ensemble

    def is_ready() -> bool:
        return ensemble.ready

    assert is_ready() and asyncio.run(ensemble.why_not_ready()) == ""
    second.ready = False
    assert not is_ready()
    assert asyncio.run(ensemble.why_not_ready()) == (
        "its step model 'second' is not ready: it sleeps"
    )


def test_a_draining_model_accepts_only_requests_of_ensembles_that_hold_it() -> None:
    async def work() -> None:
        member = Member("m")
        line = Line(member)
        call, _ = line.send_request()
        line.ensemble.acquire()
        drained = asyncio.ensure_future(line.ensemble.drain())
        await asyncio.sleep(0)
        other, _ = line.send_request()
        member.answer(1, index=0)
        member.answer(1, index=1)
        assert call.finished and other.finished
        await asyncio.sleep(0)
        assert not drained.done()
        line.ensemble.release()
        await asyncio.wait_for(drained, 60)
        with pytest.raises(HostError, match="has stopped accepting new inference requests"):
            line.send_request()

    asyncio.run(work())


def test_abort_ends_running_steps() -> None:
    member = Member("m")
    line = Line(member)
    call, answers = line.send_request()
    assert line.ensemble.in_flight == 1
    line.ensemble.abort(internal("over"))
    assert call.finished and line.ensemble.in_flight == 0
    assert answers[0] is not None and answers[0].error is not None
    assert answers[0].error.message == "over"
