"""Writes a model repository with two models without code: for ONNX Runtime and for PyTorch.

Both are the same logistic regression: the probabilities that a flower is of each of three kinds.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np
import onnx
import torch
from onnx import TensorProto, helper, numpy_helper

WEIGHTS = np.array(
    [[-0.42, 0.53, -0.11], [0.97, -0.32, -0.65], [-2.52, -0.2, 2.72], [-1.08, -0.94, 2.02]],
    np.float32,
)
BIAS = np.array([9.84, 2.22, -12.06], np.float32)


def write_onnx(path: Path) -> None:
    """Writes an ONNX model. It needs no configuration: the file names its inputs and outputs."""
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["FLOWER", "weights", "bias"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["KIND"], axis=1),
        ],
        "iris",
        [helper.make_tensor_value_info("FLOWER", TensorProto.FLOAT, ["batch", 4])],
        [helper.make_tensor_value_info("KIND", TensorProto.FLOAT, ["batch", 3])],
        [numpy_helper.from_array(WEIGHTS, "weights"), numpy_helper.from_array(BIAS, "bias")],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    onnx.save(model, path)


class Iris(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.from_numpy(WEIGHTS))
        self.bias = torch.nn.Parameter(torch.from_numpy(BIAS))

    def forward(self, FLOWER: torch.Tensor) -> torch.Tensor:
        return torch.softmax(FLOWER @ self.weights + self.bias, dim=1)


def write_torch(path: Path) -> None:
    """Writes an exported program. It describes its inputs and outputs, but has no output names."""
    batch = torch.export.Dim("batch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        program = torch.export.export(
            Iris(), (torch.zeros(2, 4),), dynamic_shapes={"FLOWER": {0: batch}}
        )
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.export.save(program, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    repository = parser.parse_args().repository
    write_onnx(repository / "iris_onnx" / "1" / "model.onnx")
    write_torch(repository / "iris_torch" / "1" / "model.pt2")
    print(f"{repository} has iris_onnx and iris_torch")


if __name__ == "__main__":
    main()
