"""Loads that would never end: pipes in the place of files, and stubs that stand still."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path

import pytest

from tests.clients import infer_error
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

MODEL = """
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        return [pb_utils.InferenceResponse([]) for _ in requests]
"""
PLAIN = 'backend: "python" input [ { name: "X" data_type: TYPE_INT32 dims: [ 1 ] } ] '
LABELS = 'output [ { name: "Y" data_type: TYPE_INT32 dims: [ 1 ] label_filename: "labels" } ]'
WARMUP = (
    'model_warmup [ { name: "s" batch_size: 1 inputs { key: "X" value'
    ' { data_type: TYPE_INT32 dims: [ 1 ] input_data_file: "data" } } } ]'
)
STATE = (
    'sequence_batching { state { input_name: "I" output_name: "O" data_type: TYPE_INT32'
    ' dims: [ 1 ] initial_state { name: "i" dims: [ 1 ] data_type: TYPE_INT32'
    ' data_file: "data" } } }'
)
CHECKSUM = (
    'model_repository_agents { agents { name: "checksum" parameters'
    ' { key: "MD5:1/weights" value: "00" } } }'
)
REQUIREMENTS = (
    'parameters { key: "PYTHON_REQUIREMENTS" value { string_value: "requirements.txt" } }'
)
ENVIRONMENT = (
    'parameters { key: "EXECUTION_ENV_PATH" value'
    ' { string_value: "$$TRITON_MODEL_DIRECTORY/environment.tar.gz" } }'
)

PIPES = {
    "code": ("1/model.py", PLAIN),
    "network": ("1/model.onnx", 'backend: "onnxruntime" '),
    "configuration": ("config.pbtxt", None),
    "labels": ("labels", PLAIN + LABELS),
    "warmup": ("warmup/data", PLAIN + WARMUP),
    "state": ("initial_state/data", PLAIN + STATE),
    "checksum": ("1/weights", PLAIN + CHECKSUM),
    "requirements": ("requirements.txt", PLAIN + REQUIREMENTS),
    "environment": ("environment.tar.gz", PLAIN + ENVIRONMENT),
}
"""By model: the file that is a pipe, and the configuration that makes the server read it."""


@pytest.fixture(scope="module")
def pipes(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    for name, (file, config) in PIPES.items():
        model = MODEL if file != "1/model.py" else None
        path = module_repository.add(name, model, config) / file
        path.parent.mkdir(exist_ok=True)
        os.mkfifo(path)
    return module_serve(module_repository, "--model-control-mode=explicit").wait_started()


@pytest.mark.parametrize("name", PIPES)
def test_a_pipe_in_the_place_of_a_file_is_refused_by_its_name(
    pipes: RunningHost, name: str
) -> None:
    with pipes.client() as client:
        infer_error(client.load_model, name, client_timeout=DEADLINE)
    file = Path(PIPES[name][0]).name
    said = [line for line in pipes.lines if "failed to load" in line and f"'{name}'" in line]
    assert said and file in said[0] and "it is not a regular file" in said[0], pipes.output


def test_a_pipe_that_only_the_model_knows_is_its_own_affair(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    os.mkfifo(repository.add("own", MODEL) / "1" / "pipe")
    with serve(repository).wait_started().client() as client:
        assert client.is_model_ready("own")


def test_a_load_that_hangs_is_ended_if_a_limit_is_set(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    hangs = """
    import threading
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            threading.Event().wait()
    """
    warmup = WARMUP.replace('input_data_file: "data"', "zero_data: true")
    repository.add("hangs", hangs, PLAIN + warmup)
    source = """
    import os
    import signal

    class TritonPythonModel:
        def initialize(self, args):
            os.kill(os.getpid(), signal.SIGSTOP)
    """
    repository.add("stands", source, 'backend: "python"')
    host = serve(
        repository,
        "--model-control-mode=explicit",
        "--disable-auto-complete-config",
        "--stub-load-timeout-secs=2",
    ).wait_started()
    reasons = {
        "stands": "Stub process 'stands_0' is not healthy."
        " It did not respond within 2 s while initializing",
        "hangs": "failed to run warmup sample 's': Stub process 'hangs_0' is not healthy."
        " It did not complete this request within 2 s",
    }

    def is_gone(stub: str) -> bool:
        return not host.stubs(stub)

    for name, reason in reasons.items():
        with host.client() as client:
            infer_error(client.load_model, name)
        host.wait_for(f"failed to load '{name}' version 1: Internal: {reason}")
        stub = f"{name}_0"
        wait_until(partial(is_gone, stub), f"the stub {stub} to be ended")
