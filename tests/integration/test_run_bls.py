"""`pbhost run` of models that call other models of their repository."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, RepositoryBuilder

CONFIG = """
input { name: "X" data_type: TYPE_INT32 dims: [ -1 ] }
output { name: "Y" data_type: TYPE_INT32 dims: [ -1 ] }
"""
ASK = """
import numpy as np
import triton_python_backend_utils as pb_utils
IMPORT

class TritonPythonModel:
    def initialize(self, args):
        print("initialize", args["model_name"])

    ASYNC execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X")
            question = pb_utils.InferenceRequest(
                model_name="TARGET", requested_output_names=["Y"], inputs=[x]
            )
            answer = CALL
            if answer.has_error():
                responses.append(pb_utils.InferenceResponse(error=answer.error()))
                continue
            y = pb_utils.get_output_tensor_by_name(answer, "Y").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", y + 1)]))
        return responses

    def finalize(self):
        print("finalize")
"""
DOUBLE = """
import triton_python_backend_utils as pb_utils
import helper

class TritonPythonModel:
    def initialize(self, args):
        print("initialize", args["model_name"])

    def execute(self, requests):
        responses = []
        for request in requests:
            x = pb_utils.get_input_tensor_by_name(request, "X").as_numpy()
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("Y", helper.FACTOR * x)]))
        return responses

    def finalize(self):
        print("finalize double")
"""


def asking(target: str, asynchronous: bool = False, imports: str = "") -> str:
    """A model that adds 1 to the response of another one."""
    call = "await question.async_exec()" if asynchronous else "question.exec()"
    define = "async def" if asynchronous else "def"
    replaced = {"TARGET": target, "CALL": call, "ASYNC": define, "IMPORT": imports}
    text = ASK
    for name, value in replaced.items():
        text = text.replace(name, value)
    return text


def run(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pbhost", "run", *map(str, arguments)],
        capture_output=True,
        text=True,
        stdin=subprocess.DEVNULL,
        timeout=DEADLINE,
        check=False,
    )


def outputs(done: subprocess.CompletedProcess[str]) -> list[str]:
    """What was printed, without times."""
    assert (done.returncode, done.stderr) == (0, "")
    return [line for line in done.stdout.splitlines() if not line.startswith("done in")]


@pytest.mark.parametrize("asynchronous", [False, True], ids=["exec", "async_exec"])
def test_models_that_are_called_are_loaded_then(
    repository: RepositoryBuilder, asynchronous: bool
) -> None:
    first = repository.add("first", asking("second", asynchronous), CONFIG)
    repository.add("second", asking("double"), CONFIG)
    repository.add("double", DOUBLE, CONFIG, files={"1/helper.py": "FACTOR = 2\n"})
    repository.add("unused", "raise SystemExit('not asked')\n", CONFIG)
    repository.add("broken", "", "max_batch_size: many")
    assert outputs(run(first, "--input=X=[1, 5]")) == [
        "initialize first",
        "initialize second",
        "initialize double",
        "response 1",
        "  Y INT32 [2]",
        "    [ 4, 12]",
        "finalize",
        "finalize double",
        "finalize",
    ]


def test_modules_of_the_models_may_have_the_same_name(repository: RepositoryBuilder) -> None:
    first = repository.add(
        "first",
        asking("double", imports="import helper\nassert helper.FACTOR == 7\nfrom . import helper"),
        CONFIG,
        files={"1/helper.py": "FACTOR = 7\n"},
    )
    repository.add("double", DOUBLE, CONFIG, files={"1/helper.py": "FACTOR = 2\n"})
    assert "    [3]" in outputs(run(first, "--input=X=1"))


def test_models_may_call_each_other(repository: RepositoryBuilder) -> None:
    count_down = """
    import triton_python_backend_utils as pb_utils

    class TritonPythonModel:
        def initialize(self, args):
            print("initialize", args["model_name"])

        def execute(self, requests):
            x = pb_utils.get_input_tensor_by_name(requests[0], "X").as_numpy()
            if x[0] == 0:
                return [pb_utils.InferenceResponse([pb_utils.Tensor("Y", x)])]
            less = pb_utils.Tensor("X", x - 1)
            question = pb_utils.InferenceRequest(
                model_name="second", requested_output_names=["Y"], inputs=[less]
            )
            return [question.exec()]
    """
    first = repository.add("first", count_down, CONFIG)
    repository.add("second", asking("first"), CONFIG)
    done = outputs(run(first, "--input=X=3"))
    assert "    [3]" in done
    assert done.count("initialize first") == 1


def test_a_model_that_cannot_be_called_is_an_error_with_its_reason(
    repository: RepositoryBuilder,
) -> None:
    for target, missing, files, reason in [
        ("nowhere", "is not found", None, ""),
        (
            "raises",
            "has no available versions",
            ("import no_such_library\n", CONFIG),
            "pbhost run: model 'raises' cannot be loaded: No module named 'no_such_library'\n",
        ),
        (
            "both",
            "has no available versions",
            (
                None,
                'platform: "ensemble" ensemble_scheduling { step { model_name: "double" } }'
                + CONFIG,
            ),
            "pbhost run: model 'both' cannot be loaded: ",
        ),
    ]:
        if files is not None:
            repository.add(target, *files)
        first = repository.add("first", asking(target), CONFIG)
        done = run(first, "--input=X=1")
        assert done.returncode == 1
        said = f"Request for unknown model: '{target}' {missing}"
        assert done.stderr.splitlines()[-1].endswith(said), done.stderr
        assert reason in done.stderr
