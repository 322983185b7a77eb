"""The harness with models that call, load and unload other models, and that have metrics."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
from c_python_backend_utils import MetricKind
from pb_utils import testing
from tests.conftest import DEADLINE

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
DECOUPLED: dict[str, Any] = {"model_transaction_policy": {"decoupled": True}}


def response(number: int) -> pb_utils.InferenceResponse:
    return pb_utils.InferenceResponse([pb_utils.Tensor("N", np.array([number]))])


def make_request(name: str = "other") -> pb_utils.InferenceRequest:
    return pb_utils.InferenceRequest(model_name=name, inputs=[], requested_output_names=[])


def number(item: pb_utils.InferenceResponse) -> int | str | None:
    """Returns the number in a response, the text of its error, or None for an empty response."""
    error = item.error()
    if error is not None:
        return error.message()
    tensors = item.output_tensors()
    return int(tensors[0].as_numpy()[0]) if tensors else None


def run_in_model(act: Callable[[], Any], **arguments: Any) -> Any:
    """Returns the result of a function that a model calls in ``execute``."""
    results: list[Any] = []

    def execute(self: Any, requests: Any) -> Any:
        results.append(act())
        return [pb_utils.InferenceResponse()]

    with testing.load(type("Model", (), {"execute": execute}), name="m", **arguments) as model:
        model.infer({})
        if "control" in arguments:
            results.append(model.control)
    return results[0]


def call_decoupled(name: str = "other") -> list[int | str | None]:
    """Sends a decoupled request, from within a model, and returns the numbers of the responses."""
    return [number(item) for item in make_request(name).exec(decoupled=True)]


class Counter:
    """A decoupled model that sends 0, 1 and the final flag alone."""

    def execute(self, requests: Any) -> None:
        for request in requests:
            sender = request.get_response_sender()
            sender.send(response(0))
            sender.send(response(1))
            sender.send(flags=FINAL)


class TestDecoupledRequests:
    def test_a_generator_gives_several_responses(self) -> None:
        def other(request: Any) -> Iterator[pb_utils.InferenceResponse]:
            yield response(0)
            yield response(1)

        assert run_in_model(call_decoupled, models={"other": other}) == [0, 1, None]

    def test_a_decoupled_harness_gives_several_responses(self) -> None:
        with testing.load(Counter, DECOUPLED) as other:
            assert run_in_model(call_decoupled, models={"other": other}) == [0, 1, None]

    @pytest.mark.parametrize("kind", ["function", "constant", "harness"])
    def test_ordinary_stand_ins_give_one_response(self, kind: str) -> None:
        class One:
            def execute(self, requests: Any) -> Any:
                return [response(5)]

        with testing.load(One) as harness:
            others: dict[str, testing.Fake] = {
                "function": lambda request: response(5),
                "constant": {"N": np.array([5])},
                "harness": harness,
            }
            assert run_in_model(call_decoupled, models={"other": others[kind]}) == [5]

    @pytest.mark.parametrize("decoupled_harness", [False, True])
    def test_unary_call_of_a_decoupled_model_is_an_error(self, decoupled_harness: bool) -> None:
        def generator(request: Any) -> Iterator[pb_utils.InferenceResponse]:
            yield response(0)

        with testing.load(Counter, DECOUPLED) as harness:
            other: testing.Fake = harness if decoupled_harness else generator
            got = run_in_model(lambda: number(make_request().exec()), models={"other": other})
        assert got == (
            "Model other - Error when running inference: Model other is using the decoupled. The "
            "current BLS request call doesn't support models using the decoupled transaction "
            "policy. Please use 'decoupled=True' argument to the 'exec' or 'async_exec' calls for "
            "decoupled models.'"
        )

    def test_error_is_the_only_response(self) -> None:
        def broken(request: Any) -> Any:
            raise pb_utils.TritonModelException("broken")

        def buggy(request: Any) -> Any:
            raise ValueError("bug")

        models = {"broken": broken, "buggy": buggy}
        assert run_in_model(lambda: call_decoupled("broken"), models=models) == ["broken"]
        assert run_in_model(lambda: call_decoupled("buggy"), models=models) == [
            "the stand-in for model 'buggy' raised ValueError: bug"
        ]
        assert run_in_model(lambda: call_decoupled("missing"), models=models) == [
            (
                "Model missing - Error when running inference: Request for unknown model: "
                "'missing' is not found"
            )
        ]

    def test_a_generator_that_fails_ends_with_an_error(self) -> None:
        def other(request: Any) -> Iterator[pb_utils.InferenceResponse]:
            yield response(0)
            raise pb_utils.TritonModelException("broken")

        assert run_in_model(call_decoupled, models={"other": other}) == [0, "broken"]

    def test_cancelled_generator_is_closed(self) -> None:
        left = threading.Event()

        def other(request: Any) -> Iterator[pb_utils.InferenceResponse]:
            try:
                while True:
                    yield response(0)
            finally:
                left.set()

        def send_request() -> None:
            responses = make_request().exec(decoupled=True)
            responses.cancel()
            list(responses)

        run_in_model(send_request, models={"other": other})
        assert left.wait(DEADLINE)

    def test_cancelled_harness_sees_the_cancellation(self) -> None:
        class Patient:
            def execute(self, requests: Any) -> None:
                sender = requests[0].get_response_sender()
                sender.send(response(0))
                pause = threading.Event()
                while not requests[0].is_cancelled():
                    pause.wait(0.001)
                sender.send(response(1), FINAL)

        def send_request() -> list[Any]:
            responses = make_request().exec(decoupled=True)
            responses.cancel()
            return [number(item) for item in responses]

        with testing.load(Patient, DECOUPLED) as other:
            assert run_in_model(send_request, models={"other": other}) == [0, 1]

    def test_async_requests_overlap(self) -> None:
        together = threading.Barrier(20)

        def other(request: Any) -> Iterator[pb_utils.InferenceResponse]:
            together.wait(DEADLINE)
            yield response(0)

        async def send_request() -> list[Any]:
            async def read() -> list[Any]:
                return [number(i) async for i in await make_request().async_exec(decoupled=True)]

            return list(await asyncio.gather(*(read() for _ in range(20))))

        got = run_in_model(lambda: asyncio.run(send_request()), models={"other": other})
        assert got == [[0, None]] * 20

    def test_an_execution_timeout_cancels(self) -> None:
        cancelled = threading.Event()

        def slow(request: Any) -> pb_utils.InferenceResponse:
            pause = threading.Event()
            while not request.is_cancelled():
                pause.wait(0.001)
            cancelled.set()
            return response(0)

        got = run_in_model(
            lambda: number(make_request().exec(execution_timeout=0.05)), models={"other": slow}
        )
        assert got == (
            "The request to model 'other' was cancelled: it did not complete within its "
            "execution_timeout of 0.05 seconds."
        )
        assert cancelled.wait(DEADLINE)

    def test_harness_that_is_not_ready_gets_no_request(self) -> None:
        class NotReady(Counter):
            def is_ready(self) -> bool:
                raise ValueError("warming up")

        with testing.load(NotReady, DECOUPLED) as other:
            assert run_in_model(call_decoupled, models={"other": other}) == [
                (
                    "Model other - Error when running inference: Failed for execute the inference "
                    "request. Model 'other' is not ready."
                )
            ]
            assert "warming up" in other.logs[-1].message

    def test_late_response_of_a_harness_is_awaited(self) -> None:
        class Late:
            def execute(self, requests: Any) -> None:
                sender = requests[0].get_response_sender()
                threading.Timer(0.01, sender.send, (response(5), FINAL)).start()

        with testing.load(Late) as other:
            assert run_in_model(lambda: number(make_request().exec()), models={"other": other}) == 5

    def test_missing_response_of_a_harness_is_a_timeout_error(self) -> None:
        kept: list[Any] = []

        def execute(self: Any, requests: Any) -> None:
            kept.extend(requests)

        with testing.load(type("Never", (), {"execute": execute})) as other:
            got = run_in_model(
                lambda: number(make_request().exec()),
                models={"other": other},
                response_timeout=0.05,
            )
        assert got == ("Model 'other' did not respond within the response_timeout of 0.05 seconds.")

    def test_threads_of_a_stand_in_log_to_its_harness(self) -> None:
        class Chatty(Counter):
            def execute(self, requests: Any) -> None:
                pb_utils.Logger.log_info("other")
                super().execute(requests)

        def execute(self: Any, requests: Any) -> Any:
            call_decoupled()
            pb_utils.Logger.log_info("own")
            return [pb_utils.InferenceResponse()]

        with (
            testing.load(Chatty, DECOUPLED) as other,
            testing.load(type("Own", (), {"execute": execute}), models={"other": other}) as own,
        ):
            own.infer({})
        assert [record.message for record in own.logs] == ["own"]
        assert [record.message for record in other.logs] == ["other"]


def refusal_of(call: Callable[[], object]) -> Callable[[], str]:
    def act() -> str:
        with pytest.raises(pb_utils.TritonModelException) as caught:
            call()
        return str(caught.value)

    return act


SERVER = "Failed to process the request for model 'm_0', message: "


class TestModelControl:
    MODELS: dict[str, Any] = {"other": {"N": np.array([5])}}

    def test_model_control_is_recorded(self) -> None:
        class Model:
            def initialize(self, args: Any) -> None:
                pb_utils.load_model("other")

            def execute(self, requests: Any) -> Any:
                pb_utils.unload_model("other", unload_dependents=True)
                pb_utils.load_model("other", '{"max_batch_size": 1}', {"file:1/model.py": b"code"})
                pb_utils.unload_model("missing")
                return [pb_utils.InferenceResponse()]

        with testing.load(Model, models=self.MODELS) as model:
            model.infer({})
            assert model.control == [
                ("load", "other", "", {}),
                ("unload", "other", "", {}),
                ("load", "other", '{"max_batch_size": 1}', {"1/model.py": b"code"}),
                ("unload", "missing", "", {}),
            ]
            assert isinstance(model.control[0], testing.ModelControl)

    def test_unloaded_model_is_unavailable_until_loaded(self) -> None:
        def act() -> list[Any]:
            answers = [number(make_request().exec()), pb_utils.is_model_ready("other")]
            pb_utils.unload_model("other")
            answers.append(number(make_request().exec()))
            answers.append(refusal_of(lambda: pb_utils.is_model_ready("other"))())
            pb_utils.load_model("other")
            return [*answers, number(make_request().exec()), pb_utils.is_model_ready("other", "1")]

        unknown = "Request for unknown model: 'other' has no available versions"
        assert run_in_model(act, models=self.MODELS) == [
            5,
            True,
            f"Model other - Error when running inference: {unknown}",
            f"Failed to check model readiness: {SERVER}{unknown}",
            5,
            True,
        ]

    def test_a_held_model_stays_loaded_until_it_is_unloaded_as_often(self) -> None:
        def act() -> list[Any]:
            for _ in range(2):
                pb_utils.load_model("other", hold=True)
            pb_utils.unload_model("other")
            ready = pb_utils.is_model_ready("other")
            pb_utils.unload_model("other")
            return [ready, refusal_of(lambda: pb_utils.is_model_ready("other"))()]

        unknown = "Request for unknown model: 'other' has no available versions"
        refused = f"Failed to check model readiness: {SERVER}{unknown}"
        assert run_in_model(act, models=self.MODELS) == [True, refused]

    def test_a_model_may_be_loaded_from_files(self) -> None:
        def act() -> list[Any]:
            pb_utils.load_model("new", "{}", {"file:1/model.py": b""})
            return [pb_utils.is_model_ready("new"), number(make_request("new").exec())]

        assert run_in_model(act) == [
            True,
            (
                "Model new - Error when running inference: pbhost.testing has no stand-in for "
                "model 'new'; pass one in models="
            ),
        ]

    @pytest.mark.parametrize(
        ("name", "config", "files"),
        [
            ("missing", "", None),
            ("missing", "{}", None),
            ("other", "no JSON", None),
            ("other", "[]", None),
            ("other", "", {"file:1/model.py": b""}),
        ],
    )
    def test_loads_that_a_server_rejects_are_rejected(
        self, name: str, config: str, files: Any
    ) -> None:
        act = refusal_of(lambda: pb_utils.load_model(name, config, files))
        assert run_in_model(act, models=self.MODELS) == (
            f"Failed to load model: {SERVER}failed to load '{name}', failed to poll from model "
            "repository"
        )

    @pytest.mark.parametrize(
        ("name", "version", "text"),
        [
            ("missing", "", "Request for unknown model: 'missing' is not found"),
            (
                "other",
                "x",
                (
                    "failed to get model version from specified version string 'x' (details: "
                    "stol), version should be an integral value > 0"
                ),
            ),
            (
                "other",
                "-1",
                (
                    "failed to get model version from specified version string '-1', version "
                    "should be an integral value > 0"
                ),
            ),
        ],
    )
    def test_readiness_of_an_unknown_model_is_an_error(
        self, name: str, version: str, text: str
    ) -> None:
        act = refusal_of(lambda: pb_utils.is_model_ready(name, version))
        assert run_in_model(act, models=self.MODELS) == (
            f"Failed to check model readiness: {SERVER}{text}"
        )

    def test_readiness_of_a_harness_calls_its_is_ready(self) -> None:
        class Model:
            def is_ready(self) -> bool:
                return False

        with testing.load(Model) as other:
            assert run_in_model(lambda: pb_utils.is_model_ready("o"), models={"o": other}) is False


class Metered:
    """Counts its requests by outcome, observes the sum of its input, and sets a gauge."""

    def initialize(self, args: Any) -> None:
        family = pb_utils.MetricFamily
        self.requests: Any = family("requests", "How many", family.COUNTER)
        self.good = self.requests.Metric({"outcome": "good"})
        self.sizes = family("sizes", "How large", family.HISTOGRAM)
        self.size = self.sizes.Metric(buckets=[1, 10])
        self.levels = family("level", "How high", family.GAUGE)
        self.level = self.levels.Metric(labels={})

    def execute(self, requests: Any) -> Any:
        for request in requests:
            self.good.increment(1)
            self.size.observe(float(request.inputs()[0].as_numpy().sum()))
            self.level.set(3)
            self.level.increment(-0.5)
        return [pb_utils.InferenceResponse() for _ in requests]


class TestMetrics:
    def test_metrics_can_be_read_by_test_and_model(self) -> None:
        with testing.load(Metered) as model:
            assert model.metric("requests", {"outcome": "good"}).value == 0
            for x in ([1, 2], [40]):
                model.infer({"X": x})
            good = model.metric("requests", {"outcome": "good"})
            assert good == ("requests", MetricKind.COUNTER, {"outcome": "good"}, 2.0, [])
            assert isinstance(good, testing.MetricSample)
            sizes = model.metric("sizes")
            assert (sizes.value, sizes.observations) == (43.0, [3.0, 40.0])
            assert model.metric("level").value == model.model.level.value() == 2.5
            assert len(model.metrics()) == 3

    def test_missing_metric_error_lists_existing_metrics(self) -> None:
        with testing.load(Metered) as model:
            with pytest.raises(pb_utils.TritonModelException) as caught:
                model.metric("requests")
        assert str(caught.value).startswith("The model has no metric 'requests' with the labels {}")
        assert "('requests', {'outcome': 'good'})" in str(caught.value)

    def test_metrics_vanish_with_their_family(self) -> None:
        with testing.load(Metered) as model:
            model.infer({"X": [1]})
            model.model.requests = None
            gc.collect()
            assert [sample.family for sample in model.metrics()] == ["sizes", "level"]
            with pytest.raises(pb_utils.TritonModelException, match="has been deleted"):
                model.model.good.increment(1)

    def test_metrics_with_equal_name_and_labels_share_a_value(self) -> None:
        def act() -> list[float]:
            families = [
                pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER) for _ in range(2)
            ]
            first, second = (family.Metric({"a": "b"}) for family in families)
            first.increment(1)
            second.increment(2)
            values = [first.value(), second.value()]
            del families[0]
            values.append(second.value())
            families.clear()
            again = pb_utils.MetricFamily("n", "d", pb_utils.MetricFamily.COUNTER)
            return [*values, again.Metric({"a": "b"}).value()]

        assert run_in_model(act) == [3, 3, 3, 0]

    def test_invalid_metrics_are_rejected_as_by_a_server(self) -> None:
        def act() -> list[str]:
            family = pb_utils.MetricFamily
            counter = family("n", "d", family.COUNTER)
            histogram = family("h", "d", family.HISTOGRAM)
            return [
                refusal_of(lambda: family("n", "d", family.GAUGE))(),
                refusal_of(lambda: counter.Metric({"a": 5}))(),  # type: ignore[dict-item]  # wrong on purpose
                refusal_of(lambda: histogram.Metric(buckets=[1, 1]))(),
                refusal_of(lambda: histogram.Metric(buckets=[float("nan")]))(),
                refusal_of(lambda: family("no name", "d", family.GAUGE))(),
                refusal_of(lambda: counter.Metric({"__a": "b"}))(),
                refusal_of(lambda: counter.Metric().increment(-1))(),
                refusal_of(lambda: counter.Metric().set(1))(),
            ]

        assert run_in_model(act) == [
            (
                f"Error when creating MetricFamily: {SERVER}Family name already exists with "
                "different type"
            ),
            f"Error when creating Metric: {SERVER}attempt to access JSON non-string as string",
            f"Error when creating Metric: {SERVER}Bucket Boundaries must be strictly sorted",
            f"Error when creating Metric: {SERVER}Bucket Boundaries must be strictly sorted",
            (
                f"Error when creating MetricFamily: {SERVER}Invalid metric name 'no name'; it must "
                "match [a-zA-Z_:][a-zA-Z0-9_:]* and not begin with '__'"
            ),
            (
                f"Error when creating Metric: {SERVER}Invalid label name '__a'; it must match "
                "[a-zA-Z_][a-zA-Z0-9_]* and not begin with '__'"
            ),
            (
                f"Failed to increment metric value: {SERVER}TRITONSERVER_METRIC_KIND_COUNTER can "
                "only be incremented monotonically by non-negative values."
            ),
            (
                f"Failed to set metric value: {SERVER}TRITONSERVER_METRIC_KIND_COUNTER does not "
                "support Set"
            ),
        ]
