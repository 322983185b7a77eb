"""Threads of models that wait for another model while their own model is unloaded."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest

from tests.clients import tensor
from tests.conftest import RepositoryBuilder, Serve

CONFIG = """
backend: "python"
max_batch_size: 0
input [ { name: "X" data_type: TYPE_FP32 dims: [ 1 ] } ]
output [ { name: "Y" data_type: TYPE_FP32 dims: [ 1 ] } ]
"""
DECOUPLED = CONFIG + "model_transaction_policy { decoupled: true }"

WAITING = """
import threading
import numpy as np
import triton_python_backend_utils as pb_utils

def tensor(name):
    return pb_utils.Tensor(name, np.ones(1, np.float32))

def call():
    request = pb_utils.InferenceRequest(
        model_name="blocked", inputs=[tensor("X")], requested_output_names=["Y"]
    )
    responses = request.exec(decoupled=True) if DECOUPLED else [request.exec()]
    for response in responses:
        print("thread got:", response.error().message(), flush=True)

class TritonPythonModel:
    def execute(self, requests):
        threading.Thread(target=call).start()
        return [pb_utils.InferenceResponse([tensor("Y")]) for _ in requests]

    def finalize(self):
        print("finalize begins", flush=True)
"""

BLOCKED = """
import os
import threading
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        print("blocked has begun", flush=True)
        pause = threading.Event()
        while not os.path.exists(RELEASED):
            pause.wait(0.01)
        return None if DECOUPLED else [pb_utils.InferenceResponse([]) for _ in requests]
"""


@pytest.mark.parametrize("end", ["unload", "stop"])
@pytest.mark.parametrize("decoupled", [False, True], ids=["exec", "iterator"])
def test_a_thread_that_waits_for_another_model_ends_when_its_model_is_unloaded(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path, end: str, decoupled: bool
) -> None:
    released = tmp_path / "released"
    constants = f"DECOUPLED = {decoupled}\nRELEASED = {str(released)!r}\n"
    repository.add("waiting", constants + WAITING, CONFIG)
    repository.add("blocked", constants + BLOCKED, DECOUPLED if decoupled else CONFIG)
    host = serve(repository, "--model-control-mode=explicit", "--load-model=*").wait_started()
    with host.client() as client:
        client.infer("waiting", [tensor("X", np.ones(1, dtype=np.float32))])
        host.wait_for("blocked has begun")
        if end == "unload":
            client.unload_model("waiting")
        else:
            host.process.send_signal(signal.SIGTERM)
        host.wait_for("thread got: the model instance has ended")
    assert "finalize begins" in host.output
    released.touch()
    assert host.stop() == 0
