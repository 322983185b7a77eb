"""Traces continue from the client through the deployments of models."""

from __future__ import annotations

import json

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import tensor
from tests.conftest import RepositoryBuilder, wait_until
from tests.ray.conftest import GRPC, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")
pytest.importorskip("opentelemetry.exporter.otlp.proto.http")

SPY = """
import json
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        seen = np.array([request.trace().get_context()], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", seen)])
"""
ASKER = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        return pb_utils.InferenceRequest(
            model_name="spy", requested_output_names=["OUTPUT0"], inputs=request.inputs(),
            trace=request.trace(),
        ).exec()
"""
CONFIG = """
input [{name: "INPUT0", data_type: TYPE_FP32, dims: [1]}]
output [{name: "OUTPUT0", data_type: TYPE_STRING, dims: [1]}]
instance_group [{count: 1, kind: KIND_CPU}]
"""
TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


def test_a_trace_goes_on_in_the_deployments_of_other_models(
    cluster: RayCluster, repository: RepositoryBuilder
) -> None:
    from host.ray import model_apps
    from tests.otlp import collecting

    repository.add("spy", SPY, CONFIG)
    repository.add("asker", ASKER, CONFIG)
    with collecting() as collector:
        settings = [
            "mode=opentelemetry", "level=TIMESTAMPS", "rate=1",
            f"opentelemetry,url={collector.url}", "opentelemetry,bsp_schedule_delay=20",
        ]  # fmt: skip
        arguments = {"model_repository": str(repository.path), "trace_config": settings}
        with (
            cluster.deploy(model_apps(arguments)) as replicas,
            grpcclient.InferenceServerClient(GRPC) as client,
        ):
            given = [tensor("INPUT0", np.zeros(1, np.float32))]
            header = {"traceparent": f"00-{TRACE}-{SPAN}-01"}

            def asks() -> None:
                answer = client.infer("asker", given, headers=header).as_numpy("OUTPUT0")[0]
                assert json.loads(answer)["traceparent"].split("-")[1] == TRACE

            def connected() -> bool:
                """Whether there are connections to both."""
                asks()
                return all(
                    replicas.logged(f"connected to a replica of deployment 'model-{name}'")
                    for name in ("asker", "spy")
                )

            asks()  # by handles
            wait_until(connected, "connections to replicas")
            asks()  # by a connection
