"""Traces as OpenTelemetry spans: at a collector, below a client's span, and inside models."""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from tests.clients import infer_error, tensor
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve
from tests.otlp import Collector, collecting

SPY = """
    import json
    import numpy as np
    from opentelemetry import trace
    import triton_python_backend_utils as pb_utils

    def current():
        context = trace.get_current_span().get_span_context()
        return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"

    def answer(request):
        seen = json.dumps({"context": request.trace().get_context(), "current": current()})
        output = pb_utils.Tensor("OUTPUT0", np.array([seen], dtype=np.object_))
        return pb_utils.InferenceResponse([output])
    """
EXECUTE = """
    class TritonPythonModel:
        def execute(self, requests):
            return [answer(request) for request in requests]
    """
COROUTINE = """
    class TritonPythonModel:
        async def execute(self, requests):
            return [answer(request) for request in requests]
    """
ASKER = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            return [
                pb_utils.InferenceRequest(
                    model_name="spy",
                    requested_output_names=["OUTPUT0"],
                    inputs=request.inputs(),
                    trace=request.trace(),
                ).exec()
                for request in requests
            ]
    """
UNLUCKY = """
    class TritonPythonModel:
        def execute(self, requests):
            raise ValueError("no luck")
    """
CONFIG = """
    input [ { name: "INPUT0", data_type: TYPE_FP32, dims: [ 1 ] } ]
    output [ { name: "OUTPUT0", data_type: TYPE_STRING, dims: [ 1 ] } ]
    """
CHAIN = (
    CONFIG
    + """
    platform: "ensemble"
    ensemble_scheduling { step [
      { model_name: "spy", model_version: -1,
        input_map { key: "INPUT0", value: "INPUT0" },
        output_map { key: "OUTPUT0", value: "OUTPUT0" } }
    ] }
    """
)
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
COMPUTE = ["COMPUTE_START", "COMPUTE_INPUT_END", "COMPUTE_OUTPUT_START", "COMPUTE_END"]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    with collecting() as collector:
        yield collector


@pytest.fixture(scope="module")
def models(module_repository: RepositoryBuilder) -> RepositoryBuilder:
    module_repository.add("spy", SPY + EXECUTE, CONFIG)
    module_repository.add("async_spy", SPY + COROUTINE, CONFIG)
    module_repository.add("asker", ASKER, CONFIG)
    module_repository.add("unlucky", UNLUCKY, CONFIG)
    module_repository.add("chain", config=CHAIN)
    return module_repository


def flags(collector: Collector, *more: str) -> list[str]:
    settings = [
        "mode=opentelemetry",
        "level=TIMESTAMPS",
        f"opentelemetry,url={collector.url}",
        "opentelemetry,resource=service.name=of the test",
        "opentelemetry,resource=room=7",
        "opentelemetry,bsp_schedule_delay=20",
        *more,
    ]
    return [f"--trace-config={setting}" for setting in settings]


@pytest.fixture(scope="module")
def host(models: RepositoryBuilder, module_serve: Serve, collector: Collector) -> RunningHost:
    return module_serve(models, *flags(collector, "rate=1")).wait_started()


def send_request(host: RunningHost, model: str, request_id: str, **headers: str) -> dict[str, Any]:
    """The records of the observing model."""
    with host.client() as client:
        given = [tensor("INPUT0", np.zeros(1, np.float32))]
        result = client.infer(model, given, request_id=request_id, headers=headers)
        seen: dict[str, Any] = json.loads(result.as_numpy("OUTPUT0")[0])
        return seen


def test_a_request_is_exported_as_a_tree_of_spans(host: RunningHost, collector: Collector) -> None:
    send_request(host, "spy", "tree")
    spans = collector.wait_for_request("tree", 3)
    root, model, compute = spans["InferRequest"], spans["spy"], spans["compute"]
    assert (root.parent, model.parent, compute.parent) == ("", root.id, model.id)
    assert (root.kind, model.kind) == (2, 1)  # server, internal
    assert root.events == [
        "GRPC_WAITREAD_START",
        "GRPC_WAITREAD_END",
        "INFER_RESPONSE_COMPLETE",
        "GRPC_SEND_START",
        "GRPC_SEND_END",
    ]
    assert model.events == ["REQUEST_START", "QUEUE_START", "REQUEST_END"]
    assert compute.events == COMPUTE
    number = model.attributes.pop("triton.trace_id")
    assert number > 0
    assert model.attributes == {
        "triton.model_name": "spy",
        "triton.model_version": 1,
        "triton.trace_parent_id": 0,
        "triton.request_id": "tree",
    }
    assert root.start <= model.start <= compute.start < compute.end <= model.end <= root.end
    assert {span.scope for span in spans.values()} == {"triton-server"}
    assert root.resource["service.name"] == "of the test"
    assert root.resource["room"] == "7"
    assert collector.types == {"application/x-protobuf"}


def test_requests_over_http_have_events_of_the_http_endpoint(
    host: RunningHost, collector: Collector
) -> None:
    traceparent = f"00-{TRACE[::-1]}-{SPAN}-01"
    given = {"name": "INPUT0", "shape": [1], "datatype": "FP32", "data": [0]}
    request = urllib.request.Request(
        f"http://{host.http_url}/v2/models/spy/infer",
        json.dumps({"inputs": [given]}).encode(),
        {"traceparent": traceparent, "tracestate": "vendor=value"},
    )
    with urllib.request.urlopen(request, timeout=DEADLINE) as answer:
        seen = json.loads(json.load(answer)["outputs"][0]["data"][0])
    spans = collector.wait_for_trace(TRACE[::-1], 3)
    root = spans["InferRequest"]
    assert (root.parent, root.state) == (SPAN, "vendor=value")
    assert root.events == [
        "HTTP_RECV_START",
        "HTTP_RECV_END",
        "INFER_RESPONSE_COMPLETE",
        "HTTP_SEND_START",
        "HTTP_SEND_END",
    ]
    assert json.loads(seen["context"])["tracestate"] == "vendor=value"


@pytest.mark.parametrize("model", ["spy", "async_spy"])
def test_the_compute_span_is_current_inside_execute(
    host: RunningHost, collector: Collector, model: str
) -> None:
    seen = send_request(host, model, f"inside {model}")
    spans = collector.wait_for_request(f"inside {model}", 3)
    compute = spans["compute"]
    assert seen["current"] == f"00-{compute.trace}-{compute.id}-01"
    assert json.loads(seen["context"]) == {"traceparent": seen["current"]}


def test_a_clients_span_is_the_parent(host: RunningHost, collector: Collector) -> None:
    send_request(host, "spy", "propagated", traceparent=f"00-{TRACE}-{SPAN}-01", tracestate="a=b")
    spans = collector.wait_for_trace(TRACE, 3)
    assert spans["InferRequest"].parent == SPAN
    assert {span.state for span in spans.values()} == {"a=b"}


@pytest.mark.parametrize(
    "traceparent",
    [f"00-{'0' * 32}-{SPAN}-01", f"00-{TRACE}-{'0' * 16}-01", f"ff-{TRACE}-{SPAN}-01", "nonsense"],
    ids=["no trace", "no span", "no version", "nonsense"],
)
def test_an_invalid_trace_context_starts_a_new_trace(
    host: RunningHost, collector: Collector, traceparent: str
) -> None:
    request_id = f"none {traceparent}"
    send_request(host, "spy", request_id, traceparent=traceparent)
    assert collector.wait_for_request(request_id, 3)["InferRequest"].parent == ""


@pytest.mark.parametrize(("model", "above"), [("asker", "compute"), ("chain", "chain")])
def test_spans_of_bls_requests_and_ensemble_steps_are_nested(
    host: RunningHost, collector: Collector, model: str, above: str
) -> None:
    seen = send_request(host, model, f"outer {model}")
    trace = seen["current"].split("-")[1]
    count = 5 if model == "asker" else 4
    spans = collector.wait_for(lambda span: span.trace == trace, count)
    assert len(spans) == count
    (root,) = [span for span in spans if span.name == "InferRequest"]
    (outer,) = [span for span in spans if span.name == model]
    (inner,) = [span for span in spans if span.name == "spy"]
    computing = {span.parent: span for span in spans if span.name == "compute"}
    assert outer.parent == root.id
    assert inner.parent == (computing[outer.id] if above == "compute" else outer).id
    assert seen["current"].split("-")[2] == computing[inner.id].id
    assert inner.attributes["triton.trace_parent_id"] == outer.attributes["triton.trace_id"]


def test_a_failure_is_the_status_of_its_spans(host: RunningHost, collector: Collector) -> None:
    infer_error(send_request, host, "unlucky", "unlucky")
    spans = collector.wait_for_request("unlucky", 3)
    assert "no luck" in spans["InferRequest"].failure
    assert "no luck" in spans["unlucky"].failure


def test_settings_include_the_options_of_the_mode(host: RunningHost, collector: Collector) -> None:
    with urllib.request.urlopen(f"http://{host.http_url}/v2/trace/setting", None, DEADLINE) as got:
        assert json.load(got) == {
            "trace_level": ["TIMESTAMPS"],
            "trace_rate": "1",
            "trace_count": "-1",
            "trace_mode": "opentelemetry",
            "url": collector.url,
            "resource": "service.name=of the test,room=7",
            "bsp_max_queue_size": "2048",
            "bsp_schedule_delay": "20",
            "bsp_max_export_batch_size": "512",
        }


def test_at_rate_0_only_requests_with_a_trace_context_are_traced(
    models: RepositoryBuilder, serve: Serve, collector: Collector
) -> None:
    settings = ["rate=0", "level=TENSORS", "opentelemetry,bsp_schedule_delay=3600000"]
    host = serve(
        models, *flags(collector, *settings),
        "--model-control-mode=explicit", "--load-model=spy",
    ).wait_started()  # fmt: skip
    host.wait_for("trace level TENSORS is not supported in mode opentelemetry")
    trace = TRACE.replace("0", "1")
    assert json.loads(json.dumps(send_request(host, "spy", "alone")))["context"] is None
    send_request(host, "spy", "together", traceparent=f"00-{trace}-{SPAN}-01")
    assert host.stop() == 0
    assert set(collector.wait_for_trace(trace, 3)) == {"InferRequest", "spy", "compute"}
    assert not [s for s in collector.spans if s.attributes.get("triton.request_id") == "alone"]


def test_an_unreachable_collector_is_logged(models: RepositoryBuilder, serve: Serve) -> None:
    host = serve(
        models, "--trace-config=mode=opentelemetry", "--trace-config=level=TIMESTAMPS",
        "--trace-config=rate=1", "--trace-config=opentelemetry,url=http://127.0.0.1:9/v1/traces",
        "--trace-config=opentelemetry,bsp_schedule_delay=20",
        "--model-control-mode=explicit", "--load-model=spy",
    ).wait_started()  # fmt: skip
    send_request(host, "spy", "lost")
    host.wait_for(r"\] .*traces: ")
    assert host.stop() == 0


def test_the_error_without_opentelemetry_says_how_to_install_it(
    models: RepositoryBuilder, serve: Serve, tmp_path: Any
) -> None:
    hidden = tmp_path / "opentelemetry"
    hidden.mkdir()
    (hidden / "__init__.py").write_text("raise ImportError('not here')")
    host = serve(
        models, "--trace-config=mode=opentelemetry", env={"PYTHONPATH": str(tmp_path)}
    )  # fmt: skip
    assert host.process.wait(DEADLINE) == 1
    host.wait_for(
        r"error: creating server: Unavailable - --trace-config: mode opentelemetry needs the"
        r" OpenTelemetry SDK, which is not installed \(not here\); install it by: pip install"
        r" 'pbhost\[otel\]'"
    )
