"""The parts of the harness for interactive use: immediate logs and responses, and backends."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from typing import Any

import pytest

import triton_python_backend_utils as pb_utils
from pb_utils import testing

DECOUPLED = {"model_transaction_policy": {"decoupled": True}}


class Counts:
    """Sends three responses, the last one from another thread."""

    def execute(self, requests: list[Any]) -> None:
        self.thread = threading.current_thread()
        sender = requests[0].get_response_sender()
        for _ in range(2):
            sender.send(pb_utils.InferenceResponse([]))
        pb_utils.Logger.log_warn("two of three")

        def last() -> None:
            final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
            sender.send(pb_utils.InferenceResponse([]), flags=final)

        threading.Thread(target=last).start()


def test_run_executes_in_this_thread_and_reports_responses_at_once() -> None:
    events: list[str] = []
    with testing.load(
        Counts, DECOUPLED, on_log=lambda record: events.append(record.message)
    ) as model:
        model.run(model.request({}), lambda response: events.append("response"))
        assert model.model.thread is threading.current_thread()
    assert events == ["response", "response", "two of three", "response"]


def test_run_raises_what_execute_raises() -> None:
    class Raises:
        def execute(self, requests: list[Any]) -> None:
            raise KeyError("own")

    with testing.load(Raises) as model, pytest.raises(KeyError, match="own"):
        model.run(model.request({}), lambda response: None)


def test_run_ends_with_an_error_when_the_last_response_does_not_come_in_time() -> None:
    senders = []

    class Keeps:
        def execute(self, requests: list[Any]) -> None:
            senders.append(requests[0].get_response_sender())
            senders[0].send(pb_utils.InferenceResponse([]))

    received: list[pb_utils.InferenceResponse] = []
    with testing.load(Keeps, DECOUPLED, response_timeout=0.05) as model:
        with pytest.raises(pb_utils.TritonModelException, match="response_timeout of 0.05 seconds"):
            model.run(model.request({}), received.append)
    assert [response.has_error() for response in received] == [False]


def test_run_cancels_the_request_and_drops_its_responses_after_the_timeout() -> None:
    received: list[Any] = []

    class Late:
        def execute(self, requests: list[Any]) -> None:
            self.sender = requests[0].get_response_sender()
            self.sender.send(pb_utils.InferenceResponse([]))

    with testing.load(Late, DECOUPLED, response_timeout=0.05) as model:
        with pytest.raises(pb_utils.TritonModelException, match="response_timeout"):
            model.run(model.request({}), received.append)
        sender = model.model.sender
        assert sender.is_cancelled()
        sender.send(pb_utils.InferenceResponse([]), pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
    assert len(received) == 1


def test_run_needs_a_model_that_is_loaded() -> None:
    with testing.load(Counts, DECOUPLED) as model:
        request = model.request({})
    with pytest.raises(pb_utils.TritonModelException, match="has been finalized"):
        model.run(request, lambda response: None)


@pytest.fixture
def backend(tmp_path: Path) -> Path:
    """Returns the folder of a Python-based backend; the model's folder beside it has no code."""
    folder = tmp_path / "backend"
    folder.mkdir()
    (folder / "helper.py").write_text("")
    (folder / "model.py").write_text(
        "import helper\n"
        "from pathlib import Path\n"
        "import triton_python_backend_utils as pb_utils\n"
        "class TritonPythonModel:\n"
        "    def execute(self, requests):\n"
        "        data = Path(pb_utils.get_model_dir(), 'data').read_text()\n"
        "        parameters = {'data': data, 'name': __name__}\n"
        "        return [pb_utils.InferenceResponse([], parameters=parameters) for _ in requests]\n"
    )
    for version in ("1", "2"):
        (tmp_path / "model" / version).mkdir(parents=True)
        (tmp_path / "model" / version / "data").write_text(f"of {version}")
    return folder


def test_backend_option_runs_a_python_based_backend(backend: Path) -> None:
    before = list(sys.path), set(sys.modules)
    with testing.load(backend.parent / "model", backend=backend) as model:
        (response,) = model.execute([model.request({})])
        assert response.parameters() == '{"data":"of 2","name":"model"}'
    with testing.load(backend.parent / "model", version=1, backend=backend) as model:
        (response,) = model.execute([model.request({})])
        assert response.parameters() == '{"data":"of 1","name":"model"}'
    assert sys.path == before[0]
    assert {"model", "helper"} & (set(sys.modules) - before[1]) == set()


def test_missing_model_file_of_a_backend_is_named(tmp_path: Path) -> None:
    (tmp_path / "model" / "1").mkdir(parents=True)
    paths = list(sys.path)
    with pytest.raises(pb_utils.TritonModelException, match="not found in .*/none/model.py"):
        testing.load(tmp_path / "model", backend=tmp_path / "none")
    assert sys.path == paths
