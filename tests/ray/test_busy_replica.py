"""Replicas without a free slot."""

from __future__ import annotations

import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import tritonclient.grpc as grpcclient

from tests.clients import tensor
from tests.conftest import DEADLINE, MODELS, ROOT, wait_until
from tests.ray.conftest import GRPC, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


def config(replicas: int) -> dict[str, Any]:
    from host.ray.serve_config import Proxies, make_config

    return make_config(
        {
            "model_repository": [str(ROOT / "model_repository"), str(MODELS)],
            "model_control_mode": "explicit",
            "load_model": ["stream"],
        },
        {
            "num_replicas": replicas,
            "max_ongoing_requests": 1,
            "health_check_period_s": 1,
            # Behind HAProxy, replicas of one machine would share a port otherwise.
            "ray_actor_options": {"num_cpus": 1, "resources": {"head": 1}},
        },  # fmt: skip
        Proxies("127.0.0.1", 8000, int(GRPC.split(":")[1])),
    )


@contextmanager
def open_stream() -> Iterator[None]:
    """Holds the only slot of a replica, once the model has answered on it."""
    answers: queue.Queue[Any] = queue.Queue()
    with grpcclient.InferenceServerClient(GRPC) as client:
        client.start_stream(lambda result, error: answers.put(error))
        command = np.array([b"respond keeps"], dtype=np.object_)
        client.async_stream_infer("stream", [tensor("COMMAND", command)])
        assert answers.get(timeout=DEADLINE) is None
        try:
            yield
        finally:
            client.stop_stream(cancel_requests=True)


def loads(client: grpcclient.InferenceServerClient, model: str) -> bool:
    """Whether all replicas have loaded a model; else the answer says that some were not reached."""
    try:
        client.load_model(model, client_timeout=DEADLINE)
    except grpcclient.InferenceServerException as error:
        assert "perhaps not in all others" in str(error), error
        return False
    return True


def test_a_replica_without_a_free_slot_answers_others(cluster: RayCluster) -> None:
    with (
        cluster.deploy_config(config(1)) as replicas,
        grpcclient.InferenceServerClient(GRPC) as client,
    ):
        assert loads(client, "add_sub")  # by a replica that is alone, and has no slot but for this
        # A stream holds the slot of the first replica, and each request that of the second one.
        with open_stream():
            replicas.update(config(2))
            wait_until(lambda: len(replicas.running()) == 2, "a second replica", seconds=60)
            both = set(replicas.process_ids())
            # The first one tells its address with its next health check.
            wait_until(lambda: loads(client, "identity"), "replicas to know each other")
            assert replicas.that_logged("successfully loaded 'identity'") == both
            statistics = client.get_inference_statistics("stream", client_timeout=DEADLINE)
            assert statistics.model_stats[0].execution_count == 1
            client.unload_model("identity", client_timeout=DEADLINE)
            unloaded = "successfully unloaded 'identity'"
            wait_until(lambda: replicas.that_logged(unloaded) == both, "unloads in both")
