"""A replica without a free slot."""

from __future__ import annotations

import pytest
import tritonclient.grpc as grpcclient
from tritonclient.utils import InferenceServerException

from tests.conftest import DEADLINE, ROOT
from tests.ray.conftest import GRPC, RayCluster

pytest.importorskip("ray", reason="ray is not installed: make test-ray")


def test_statistics_without_a_free_slot_are_unavailable(cluster: RayCluster) -> None:
    from host.ray import app

    arguments = {
        "model_repository": str(ROOT / "model_repository"),
        "model_control_mode": "explicit",
        "load_model": ["add_sub"],
        "deployment": {"max_ongoing_requests": 1},
    }
    # The request for the statistics itself holds the slot.
    with cluster.deploy(app(arguments)), grpcclient.InferenceServerClient(GRPC) as client:
        with pytest.raises(InferenceServerException, match="answered 'own_statistics'") as caught:
            client.get_inference_statistics("add_sub", client_timeout=DEADLINE)
        assert caught.value.status() == "StatusCode.UNAVAILABLE"
