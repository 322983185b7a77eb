"""Devices in the libraries: ONNX Runtime's accelerators, and TensorRT's DLA cores."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stub.backends.model_settings import Placement, Settings
from stub.user_model import ModelFailure

ON_GPU = Placement(
    {"model_instance_name": "m_0", "model_instance_kind": "GPU", "model_instance_device_id": "1"}
)


def providers(monkeypatch: pytest.MonkeyPatch, *asked: dict[str, Any]) -> Any:
    """Returns the execution providers of an instance on GPU 1; the fake package has all of them."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="pip install onnxruntime")
    session = importlib.import_module("stub.backends.onnxruntime.onnx_session")
    everything = ["TensorrtExecutionProvider", "CUDAExecutionProvider", "CPUExecutionProvider"]
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: everything)
    accelerators = {"gpu_execution_accelerator": list(asked)}
    config = {"name": "m", "optimization": {"execution_accelerators": accelerators}}
    return session.execution_providers(config, Settings("m", {}), ON_GPU)


def test_gpu_accelerators_come_before_cuda_and_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = {"precision_mode": "FP16", "max_workspace_size_bytes": "1024", "trt_x": "y"}
    assert providers(monkeypatch, {"name": "tensorrt", "parameters": parameters}) == [
        (
            "TensorrtExecutionProvider",
            {
                "device_id": "1",
                "trt_fp16_enable": "1",
                "trt_max_workspace_size": "1024",
                "trt_x": "y",
            },
        ),
        ("CUDAExecutionProvider", {"device_id": "1"}),
        ("CPUExecutionProvider", {}),
    ]
    cuda = {"name": "cuda", "parameters": {"cudnn_conv_algo_search": "1"}}
    assert providers(monkeypatch, cuda) == [
        ("CUDAExecutionProvider", {"device_id": "1", "cudnn_conv_algo_search": "HEURISTIC"}),
        ("CPUExecutionProvider", {}),
    ]


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (
            "tensorrt",
            (
                "unknown parameter 'p' of value 'v' is provided for TensorRT Execution Accelerator;"
                " there is precision_mode (FP32, FP16, INT8), max_workspace_size_bytes, and what"
                " begins with trt_"
            ),
        ),
        ("cuda", "unknown parameter 'p' is provided for CUDA Execution Accelerator;"),
        ("abacus", "unknown Execution Accelerator 'abacus' is requested; there is tensorrt, cuda"),
    ],
)
def test_an_unknown_parameter_of_a_gpu_accelerator_is_named(
    monkeypatch: pytest.MonkeyPatch, name: str, text: str
) -> None:
    with pytest.raises(ModelFailure) as caught:
        providers(monkeypatch, {"name": name, "parameters": {"p": "v"}})
    assert str(caught.value).startswith(text)


LIBRARY = '''
"""As much of TensorRT as it takes to come to a plan that cannot be used."""

__version__ = "0"


class ILogger:
    pass


def init_libnvinfer_plugins(log, namespace):
    pass


class Runtime:
    cores = []
    DLA_core = property(lambda self: None, lambda self, core: Runtime.cores.append(core))

    def __init__(self, log):
        pass

    def deserialize_cuda_engine(self, data):
        return None
'''


FAKED = ("tensorrt", "stub.backends.tensorrt.library")


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Any]:
    """Returns the module that opens plans, with a fake TensorRT."""
    (tmp_path / "tensorrt.py").write_text(LIBRARY)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in FAKED:
        monkeypatch.delitem(sys.modules, name, raising=False)
    yield importlib.import_module(FAKED[1])
    for name in FAKED:
        sys.modules.pop(name, None)


def test_a_secondary_device_is_the_dla_core_of_tensorrt(library: Any, tmp_path: Path) -> None:
    plan = tmp_path / "model.plan"
    plan.touch()
    group = {"secondary_devices": [{"kind": "KIND_NVDLA", "device_id": "3"}]}
    with pytest.raises(ModelFailure) as caught:
        library.open_plan("m", str(plan), Settings("m", {}), group, "8.7")
    assert library.tensorrt.Runtime.cores == [3]
    assert str(caught.value) == (
        f"model 'm' cannot be loaded: TensorRT 0 cannot use '{plan}' on a GPU of compute capability"
        " 8.7: the library gives no reason"
    )
