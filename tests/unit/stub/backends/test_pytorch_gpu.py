"""The backend `pytorch` on a real GPU."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pb_utils import testing
from tests.lazy_import import lazy_import

torch = lazy_import("torch")
torch_models = lazy_import("tests.torch_models")

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif("not torch.cuda.is_available()", reason="needs a GPU of CUDA"),
]
BACKEND = Path(__file__).parents[4] / "stub" / "backends" / "pytorch"
A = np.arange(6, dtype=np.float32).reshape(2, 3)


def tensors(*names: str, size: int = 3) -> list[dict[str, object]]:
    return [{"name": name, "data_type": "TYPE_FP32", "dims": [size]} for name in names]


def config(
    inputs: list[dict[str, object]], outputs: list[dict[str, object]], **more: object
) -> dict[str, object]:
    group = {"name": "m", "kind": "KIND_GPU", "gpus": [0], "count": 1}
    return {
        "name": "m",
        "backend": "pytorch",
        "max_batch_size": 8,
        "default_model_filename": "model.pt",
        "instance_group": [group],
        "input": inputs,
        "output": outputs,
        **more,
    }


def test_weights_and_inputs_go_to_the_gpu(tmp_path: Path) -> None:
    torch_models.script(tmp_path / "m", torch_models.SumDiff())
    settings = config(tensors("a", "b"), tensors("S", "D"))
    cleaning = {"ENABLE_CACHE_CLEANING": "true"}
    with testing.load(tmp_path / "m", settings, backend=BACKEND, parameters=cleaning) as held:
        results = held.infer({"a": A, "b": 2 * A})
        given = held.model._argument("a", A)
        assert given.device == torch.device("cuda:0")
    np.testing.assert_array_equal(results["S"], 3 * A)
    np.testing.assert_array_equal(results["D"], -A)


def test_an_exported_program_runs_on_the_gpu(tmp_path: Path) -> None:
    torch.manual_seed(7)
    network = torch_models.Network().eval()
    torch_models.export(tmp_path / "m", network, torch.randn(2, 4))
    file = {"default_model_filename": "model.pt2"}
    settings = config(tensors("x", size=4), tensors("y", size=2), **file)
    x = torch.randn(5, 4)
    with testing.load(tmp_path / "m", settings, backend=BACKEND) as held:
        result = held.infer({"x": x.numpy()})["y"]
    np.testing.assert_allclose(result, network(x).detach().numpy(), rtol=1e-3, atol=1e-5)


def test_a_file_for_the_gpus_capability_comes_before_the_default(tmp_path: Path) -> None:
    torch_models.script(tmp_path / "m", torch_models.InPlace())
    capability = ".".join(map(str, torch.cuda.get_device_capability(0)))
    files = {"default_model_filename": "no.pt", "cc_model_filenames": {capability: "model.pt"}}
    settings = config(tensors("x"), tensors("y"), **files)
    with testing.load(tmp_path / "m", settings, backend=BACKEND) as held:
        assert not held.infer({"x": -A})["y"].any()
