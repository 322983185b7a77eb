"""`pbhost serve --dev`: reloads at once, readable errors, the loopback interface only."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pytest
from tritonclient.utils import InferenceServerException

from tests.clients import InferStream, run_command, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve, wait_until
from tests.integration.control_models import CONFIG, model
from tests.integration.test_command_line import run
from tests.working_directory import without_directory

HELPED = """
import numpy as np
import triton_python_backend_utils as pb_utils
IMPORT

class TritonPythonModel:
    def initialize(self, args):
        START

    def execute(self, requests):
        LATE
        text = np.array([helper.TEXT.encode()], dtype=np.object_)
        return [
            pb_utils.InferenceResponse([pb_utils.Tensor("ANSWER", text)]) for _ in requests
        ]
"""


def helped(import_: str = "import helper", start: str = "pass", late: str = "pass") -> str:
    """A model that answers with a text of a module."""
    text = HELPED
    for name, value in {"IMPORT": import_, "START": start, "LATE": late}.items():
        text = text.replace(name, value)
    return text


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A folder with a module that models import from PYTHONPATH."""
    folder = tmp_path / "library"
    folder.mkdir()
    (folder / "helper.py").write_text("TEXT = 'first'\n")
    return folder


@pytest.fixture
def serve_dev(serve: Serve, repository: RepositoryBuilder, library: Path) -> Iterator[Serve]:
    """Starts hosts in development mode."""

    def start(*flags: str, **variables: str) -> RunningHost:
        env = {"PYTHONPATH": os.pathsep.join([str(library), str(Path.cwd())]), **variables}
        return serve(repository, "--dev", *flags, env=env).wait_started()

    yield start


def answers(host: RunningHost, name: str, text: str) -> None:
    """Returns once the model answers with this text."""
    with host.client() as client:
        wait_until(
            lambda: client.is_model_ready(name) and run_command(client, "name", name) == text,
            f"the answer {text}",
            state=lambda: host.output,
        )


def test_a_model_is_reloaded_when_its_files_change(
    repository: RepositoryBuilder, serve_dev: Serve
) -> None:
    repository.add("x", model("first"), CONFIG)
    host = serve_dev()
    answers(host, "x", "first")
    repository.add("x", model("second"))
    answers(host, "x", "second")
    host.wait_for(r"files of 'x' have changed: \S*x/1/model\.py")
    repository.add("y", model("new"), CONFIG)
    answers(host, "y", "new")
    assert len(re.findall("loading: x:1", host.output)) == 2, host.output


def test_a_model_is_reloaded_where_the_working_directory_is_gone(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    repository.add("x", model("first"), CONFIG)
    host = serve(repository, "--dev", under=without_directory(tmp_path)).wait_started()
    answers(host, "x", "first")
    repository.add("x", model("second"))
    answers(host, "x", "second")
    host.wait_for(rf"files of 'x' have changed: {repository.path}/x/1/model\.py")


@pytest.mark.parametrize("late", [False, True], ids=["at the top", "in execute"])
def test_a_model_is_reloaded_when_a_module_that_it_imports_changes(
    repository: RepositoryBuilder, serve_dev: Serve, library: Path, late: bool
) -> None:
    source = helped("", late="import helper") if late else helped()
    repository.add("x", source, CONFIG)
    repository.add("other", model("other"), CONFIG)
    host = serve_dev()
    for text in ("first", "second", "third"):
        RepositoryBuilder(library).write(library / "helper.py", f"TEXT = {text!r}\n")
        answers(host, "x", text)
    assert len(re.findall("loading: other:1", host.output)) == 1, host.output


def test_a_model_that_fails_is_tried_again_when_what_it_imports_is_repaired(
    repository: RepositoryBuilder, serve_dev: Serve, library: Path
) -> None:
    writer = RepositoryBuilder(library)
    writer.write(library / "helper.py", "TEXT = (\n")
    repository.add("x", helped(), CONFIG)
    repository.add("beacon", model("0"), CONFIG)
    host = serve_dev()
    with host.client() as client:
        assert not client.is_model_ready("x")
    assert len(re.findall("failed to load 'x'", host.output)) == 1, host.output
    writer.write(library / "helper.py", "TEXT = absent\n")
    host.wait_for("NameError: name 'absent' is not defined")
    assert len(re.findall("failed to load 'x'", host.output)) == 2, host.output
    writer.write(library / "helper.py", "TEXT = 'whole'\n")
    answers(host, "x", "whole")


@pytest.mark.parametrize("decoupled", ["false", "true"])
def test_an_output_outside_the_configuration_is_an_error(
    repository: RepositoryBuilder, serve_dev: Serve, decoupled: str
) -> None:
    source = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def execute(self, requests):
            for request in requests:
                x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
                outputs = [pb_utils.Tensor(name, x) for name in ("Y", "y")]
                final = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
                request.get_response_sender().send(pb_utils.InferenceResponse(outputs), final)
    """
    config = f"""
    input {{ name: "X" data_type: TYPE_FP32 dims: [ -1 ] }}
    output [{{ name: "Y" data_type: TYPE_FP32 dims: [ -1 ] }}]
    model_transaction_policy {{ decoupled: {decoupled} }}
    """
    repository.add("m", source, config)
    host = serve_dev()
    with InferStream(host) as stream:
        for size in (1, 1 << 20):  # in the message, and in shared memory
            stream.send_inputs("m", tensor("X", np.zeros(size, np.float32)))
            with pytest.raises(
                InferenceServerException,
                match="model 'm' returned an output 'y', which its configuration does not have; the"
                " configuration has: 'Y'",
            ):
                stream.next()


def test_the_version_before_serves_while_the_new_one_fails(
    repository: RepositoryBuilder, serve_dev: Serve
) -> None:
    repository.add("x", model("first"), CONFIG)
    host = serve_dev()
    for times in (1, 2):  # the same failure of another change is told again
        repository.add("x", "import no_such_library\n")
        host.wait_for(f"(?s)(failed to load 'x'.*){{{times}}}")
        answers(host, "x", "first")
    repository.add("x", model("second"))
    answers(host, "x", "second")


def test_errors_are_shown_with_the_source_lines_of_the_user(
    repository: RepositoryBuilder, serve_dev: Serve
) -> None:
    path = repository.add(
        "x", helped(start="self.prepare()\n\n    def prepare(self):\n        1 / 0")
    )
    host = serve_dev()
    found = host.wait_for(r"(?s)\d\d:\d\d:\d\d ERROR +failed to load 'x'.*?1 / 0")
    file = path / "1" / "model.py"
    assert found[0].split("\n")[1:] == [
        f"    {file}:8 in initialize",
        "      self.prepare()",
        f"    {file}:11 in prepare",
        "      1 / 0",
    ]
    assert "Failed to initialize Python stub" not in host.output, "a failure is told once"
    assert "\x1b[" not in host.output, "there is no terminal"


def test_only_the_loopback_interface_is_listened_to(
    repository: RepositoryBuilder, serve_dev: Serve
) -> None:
    repository.add("x", model("first"), CONFIG)
    host = serve_dev("--http-address=0.0.0.0", "--grpc-address=0.0.0.0")
    listening = [
        connection.laddr.ip
        for connection in psutil.Process(host.process.pid).net_connections("inet")
        if connection.status == psutil.CONN_LISTEN
    ]
    assert listening == ["127.0.0.1"] * 3
    for flag, text in {
        "--http-address=192.0.2.1": "--dev listens on the loopback interface only, got"
        " --http-address=192.0.2.1",
        "--model-control-mode=explicit": "--dev cannot be combined with"
        " --model-control-mode=explicit",
    }.items():
        done = run("serve", f"--model-repository={repository.path}", "--dev", flag)
        assert done.returncode == 1
        assert text in done.stderr
