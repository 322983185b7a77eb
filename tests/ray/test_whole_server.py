"""Replicas that hold a whole server, as clients of both protocols see them."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest
import tritonclient.grpc as grpcclient
import tritonclient.http as httpclient

from tests.conftest import MODELS
from tests.ray.conftest import GRPC, HTTP, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


@pytest.fixture(scope="module")
def served(cluster: RayCluster) -> Iterator[RayCluster]:
    """Two replicas of the models of these tests."""
    from host.ray import app

    cluster.deploy(
        app(
            {
                "model_repository": str(MODELS),
                "model_control_mode": "explicit",
                "load_model": ["identity"],
                "deployment": {"num_replicas": 2},
            }
        )
    )
    yield cluster


def test_both_protocols_reach_a_model(served: RayCluster) -> None:
    with grpcclient.InferenceServerClient(GRPC) as client:
        assert client.is_server_ready() and client.is_model_ready("identity")
        sent = np.arange(4, dtype=np.float32)
        given = grpcclient.InferInput("INPUT0", sent.shape, "FP32").set_data_from_numpy(sent)
        assert (client.infer("identity", [given]).as_numpy("OUTPUT0") == sent).all()
    with httpclient.InferenceServerClient(HTTP) as client:
        given = httpclient.InferInput("INPUT0", sent.shape, "FP32").set_data_from_numpy(sent)
        assert (client.infer("identity", [given]).as_numpy("OUTPUT0") == sent).all()
