"""The server of deploy/kserve/runtime-explicit.yaml, and a client that asks as KServe's agent.

The agent puts a model and a mark of its own into the repository, and asks for its load; it asks for
the unload before it removes the folder.
"""

from __future__ import annotations

import shutil
from contextlib import closing
from http.client import HTTPConnection

import numpy as np
import tritonclient.http as httpclient

from tests.conftest import DEADLINE, ROOT, RepositoryBuilder, RunningHost, Serve, wait_until
from tests.deploy.schemas import load_manifests

RUNTIME = ROOT / "deploy" / "kserve" / "runtime-explicit.yaml"


def agent_asks(host: RunningHost, model: str, verb: str) -> int:
    """The status of a request of the agent, which has no body."""
    with closing(HTTPConnection(host.http_url, timeout=DEADLINE)) as connection:
        path = f"/v2/repository/models/{model}/{verb}"
        connection.request("POST", path, b"", {"Content-Type": "application/json"})
        response = connection.getresponse()
        response.read()
        return response.status


def test_models_come_and_go_as_the_agent_asks(repository: RepositoryBuilder, serve: Serve) -> None:
    ((container,),) = [
        runtime["spec"]["containers"] for runtime in load_manifests(RUNTIME.read_text())
    ]
    flags = [
        flag for flag in container["args"][1:] if "-port" not in flag and "model-store" not in flag
    ]
    assert "--model-control-mode=explicit" in flags
    repository.path.mkdir(exist_ok=True)
    host = serve(repository, *flags, "--exit-delay-secs=0").wait_started()
    with httpclient.InferenceServerClient(host.http_url, network_timeout=DEADLINE) as client:
        assert client.is_server_ready() and client.get_model_repository_index() == []
        assert agent_asks(host, "identity", "load") == 500  # it has not been downloaded
        repository.copy("identity")
        (repository.path / "identity" / "SUCCESS.0c1d").touch()  # the agent's mark
        for _ in range(2):  # an agent that was restarted asks again
            assert agent_asks(host, "identity", "load") == 200
        sent = np.arange(4, dtype=np.float32)
        given = httpclient.InferInput("INPUT0", [4], "FP32").set_data_from_numpy(sent)
        result = client.infer("identity", [given]).as_numpy("OUTPUT0")
        np.testing.assert_array_equal(result, sent)
        assert agent_asks(host, "identity", "unload") == 200
        shutil.rmtree(repository.path / "identity")
        wait_until(client.is_server_ready, "the unload to end")
        assert not client.is_model_ready("identity")
