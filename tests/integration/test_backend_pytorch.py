"""Models of PyTorch, built here, in a real host."""

from __future__ import annotations

import os
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.clients import Client, infer_error, tensor
from tests.conftest import RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import

torch = lazy_import("torch")
torch_models = lazy_import("tests.torch_models")

SUM = """
    max_batch_size: 64
    input [
      { name: "a" data_type: TYPE_FP32 dims: [3] },
      { name: "b" data_type: TYPE_FP32 dims: [3] }
    ]
    output [
      { name: "S" data_type: TYPE_FP32 dims: [3] },
      { name: "D" data_type: TYPE_FP32 dims: [3] }
    ]
"""
ONE = """
    max_batch_size: 4096
    input { name: "x" data_type: TYPE_FP32 dims: [%d] }
    output { name: "y" data_type: TYPE_FP32 dims: [%d] }
"""
HUNGRY = """
    input { name: "size" data_type: TYPE_INT64 dims: [1] }
    output { name: "zeros" data_type: TYPE_FP32 dims: [-1] }
"""
PARAMETERS = {
    "INFERENCE_MODE": "false",
    "DISABLE_OPTIMIZED_EXECUTION": "true",
    "ENABLE_JIT_EXECUTOR": "false",
    "ENABLE_JIT_PROFILING": "false",
    "ENABLE_TENSOR_FUSER": "true",
    "ENABLE_WEIGHT_SHARING": "true",
    "ENABLE_CUDNN": "false",
    "INTRA_OP_THREAD_COUNT": "1",
    "INTER_OP_THREAD_COUNT": "1",
}


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Some models that work, and one that does not."""
    add = module_repository.add
    torch.manual_seed(7)
    tuned = "".join(
        f"parameters {{ key: '{key}' value {{ string_value: '{text}' }} }} "
        for key, text in PARAMETERS.items()
    )
    torch_models.script(add("tuned", config=tuned + ONE % (3, 3)), torch_models.InPlace())
    torch_models.script(add("broken", config=SUM), torch_models.SumDiff())
    (module_repository.path / "broken" / "1" / "model.pt").write_bytes(b"this is no model")
    torch_models.script(add("hungry", config=HUNGRY), torch_models.Hungry())
    torch_models.script(add("misfit", config=ONE % (5, 2)), torch_models.Network())
    host = module_serve(module_repository, "--exit-on-error=false", "--strict-readiness=false")
    return host.wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


@pytest.mark.parametrize("rows", [1, 4096])
def test_a_model_that_works_in_place_does_not_die_of_shared_memory(
    client: Client, rows: int
) -> None:
    x = np.full((rows, 3), -5, np.float32)
    for _ in range(2):
        assert not client.infer("tuned", [tensor("x", x)]).as_numpy("y").any()


def test_a_parameter_without_effect_is_told(host: RunningHost) -> None:
    host.wait_for("parameter 'ENABLE_WEIGHT_SHARING' has no effect")


def test_a_broken_file_says_so_and_the_others_serve(client: Client) -> None:
    index = client.get_model_repository_index(as_json=True)["models"]
    (mine,) = [each for each in index if each["name"] == "broken"]
    assert mine["state"] == "UNAVAILABLE"
    assert "it is not a PyTorch archive, or it is damaged" in mine["reason"]
    assert client.is_model_ready("tuned")


def test_a_run_that_needs_too_much_memory_is_an_error_and_the_next_one_is_not(
    client: Client,
) -> None:
    def zeros(size: int) -> Any:
        given = [tensor("size", np.array([size], np.int64))]
        return client.infer("hungry", given).as_numpy("zeros")

    status, text = infer_error(zeros, 1 << 46)
    assert status == "StatusCode.INTERNAL"
    assert "hungry" in text and "you tried to allocate 281474976710656 bytes" in text
    assert zeros(3).tolist() == [0, 0, 0]


def test_a_shape_that_the_file_does_not_take_is_an_error_of_the_request(client: Client) -> None:
    """TorchScript says nothing of shapes, so a wrong configuration is seen only now."""
    status, text = infer_error(client.infer, "misfit", [tensor("x", np.ones((1, 5), np.float32))])
    assert status == "StatusCode.INTERNAL"
    assert "misfit" in text and "shapes cannot be multiplied (1x5 and 4x8)" in text


def test_nan_and_infinity_are_unchanged(client: Client) -> None:
    x = np.array([[1, np.nan, -3], [-4, np.inf, 6]], np.float32)
    result = client.infer("tuned", [tensor("x", x)]).as_numpy("y")
    np.testing.assert_array_equal(result, np.maximum(x, 0))


def test_a_library_that_is_missing_is_named_with_what_installs_it(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "without").mkdir()
    (tmp_path / "without" / "torch.py").write_text("raise ModuleNotFoundError('gone')")
    torch_models.script(repository.add("m", config=SUM), torch_models.SumDiff())
    host = serve(repository, env={"PYTHONPATH": str(tmp_path / "without")})
    host.wait_for(
        r"its backend 'pytorch' needs the Python package torch, which is not installed \(gone\); to"
        r" install it: \S+ -m pip install torch"
    )


@pytest.mark.skipif(
    "PBHOST_TEST_HEAVY" not in os.environ or shutil.which("g++") is None,
    reason="compiling takes a minute and a C++ compiler: make test-backends",
)
def test_a_compiled_program_answers(repository: RepositoryBuilder, serve: Serve) -> None:
    folder = repository.add("compiled", config=ONE % (4, 2))
    torch.manual_seed(7)
    network, x = torch_models.Network().eval(), torch.randn(2, 4)
    shapes = ({0: torch.export.Dim("batch", max=8)},)
    program = torch.export.export(network, (x,), dynamic_shapes=shapes)
    path = folder / "1" / "model.pt2"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch._inductor.aoti_compile_and_package(program, package_path=str(path))
    with serve(repository).wait_started().client() as client:
        result = client.infer("compiled", [tensor("x", x.numpy())]).as_numpy("y")
        np.testing.assert_allclose(result, network(x).detach().numpy(), rtol=1e-5)
