"""A replica without a free slot."""

from __future__ import annotations

import queue
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.conftest import DEADLINE, MODELS, ROOT
from tests.ray.conftest import GRPC, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


def test_a_replica_without_a_free_slot_answers_others(cluster: RayCluster) -> None:
    from host.ray import app

    arguments = {
        "model_repository": [str(ROOT / "model_repository"), str(MODELS)],
        "model_control_mode": "explicit",
        "load_model": ["add_sub"],
        "deployment": {"num_replicas": 2, "max_ongoing_requests": 1},
    }
    # The request itself holds the slot of one replica, and a stream that of the other one.
    with cluster.deploy(app(arguments)), grpcclient.InferenceServerClient(GRPC) as client:
        client.load_model("stream")
        answers: queue.Queue[Any] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        command = grpcclient.InferInput("COMMAND", [1], "BYTES")
        command.set_data_from_numpy(np.array([b"respond keeps"], dtype=np.object_))
        client.async_stream_infer("stream", [command])
        assert answers.get(timeout=DEADLINE)[1] is None
        try:
            statistics = client.get_inference_statistics("stream", client_timeout=DEADLINE)
            assert statistics.model_stats[0].execution_count == 1
            client.load_model("identity", client_timeout=DEADLINE)
            client.unload_model("identity", client_timeout=DEADLINE)
        finally:
            client.stop_stream(cancel_requests=True)
