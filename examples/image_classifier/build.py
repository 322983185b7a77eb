"""Writes a model repository with an image classifier for each framework that is requested.

The first layer is random with a fixed seed; the second layer is fitted to drawn shapes in numpy.
"""

import argparse
import warnings
from pathlib import Path

import numpy as np

KINDS = ("circle", "square", "triangle", "cross")
SIZE, FILTERS, KERNEL, STRIDE, POOL = 32, 24, 5, 2, 4

CONFIG = """\
# Which shape an image shows: {what}.
platform: "{platform}"
max_batch_size: 8
input [ {{ name: "IMAGE", data_type: TYPE_FP32, dims: [ 1, 32, 32 ] }} ]
output [
  {{ name: "KIND", data_type: TYPE_FP32, dims: [ 4 ], label_filename: "kinds.txt" }}
]
instance_group [ {{ count: 1, kind: KIND_CPU }} ]
"""


def draw(kind: str, random: np.random.Generator) -> np.ndarray:
    """Draws a shape of random size and position, with noise: (1, 32, 32)."""
    y, x = np.mgrid[:SIZE, :SIZE] - random.uniform(13, 19, 2)[:, None, None]
    radius = random.uniform(7, 12)
    away = {
        "circle": np.hypot(x, y),
        "square": np.maximum(abs(x), abs(y)) * 1.1,
        "triangle": np.maximum(y, abs(x) * 1.8 - y) * 1.2,
        "cross": np.maximum(np.minimum(abs(x), abs(y)) * 4, np.maximum(abs(x), abs(y))),
    }[kind]
    image = (away < radius) + random.normal(0, 0.1, (SIZE, SIZE))
    return image.astype(np.float32)[None]


class Weights:
    """The weights, which are the same in all formats."""

    def __init__(self) -> None:
        random = np.random.default_rng(2024)
        self.filters = random.normal(0, 0.3, (FILTERS, 1, KERNEL, KERNEL)).astype(np.float32)
        images = np.stack([draw(kind, random) for _ in range(250) for kind in KINDS])
        wanted = np.tile(np.eye(len(KINDS)), (250, 1)) * 10 - 5
        features = self.features(images)
        features = np.hstack([features, np.ones((len(features), 1))]).astype(np.float64)
        square = features.T @ features + 10 * np.eye(features.shape[1])
        solved = np.linalg.solve(square, features.T @ wanted).astype(np.float32)
        self.matrix, self.bias = solved[:-1], solved[-1]

    def features(self, images: np.ndarray) -> np.ndarray:
        """Applies convolution and ReLU, then average over blocks of 4 by 4."""
        view = np.lib.stride_tricks.sliding_window_view(images[:, 0], (KERNEL, KERNEL), (1, 2))
        view = view[:, ::STRIDE, ::STRIDE]
        maps = np.einsum("nhwij,fij->nfhw", view, self.filters[:, 0], optimize=True).clip(0)
        side = maps.shape[2] // POOL * POOL
        maps = maps[:, :, :side, :side].reshape(len(images), FILTERS, side // POOL, POOL, -1, POOL)
        return maps.mean(axis=(3, 5)).reshape(len(images), -1)


def write_onnx(weights: Weights, path: Path) -> None:
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    kept = {"filters": weights.filters, "matrix": weights.matrix, "bias": weights.bias}
    graph = helper.make_graph(
        [
            helper.make_node("Conv", ["IMAGE", "filters"], ["maps"], strides=[STRIDE, STRIDE]),
            helper.make_node("Relu", ["maps"], ["positive"]),
            helper.make_node(
                "AveragePool", ["positive"], ["means"], kernel_shape=[POOL] * 2, strides=[POOL] * 2
            ),
            helper.make_node("Flatten", ["means"], ["features"]),
            helper.make_node("Gemm", ["features", "matrix", "bias"], ["scores"]),
            helper.make_node("Softmax", ["scores"], ["KIND"], axis=1),
        ],
        "shapes",
        [helper.make_tensor_value_info("IMAGE", TensorProto.FLOAT, ["batch", 1, SIZE, SIZE])],
        [helper.make_tensor_value_info("KIND", TensorProto.FLOAT, ["batch", len(KINDS)])],
        [numpy_helper.from_array(array, name) for name, array in kept.items()],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path / "model.onnx")


def write_torchscript(weights: Weights, path: Path) -> None:
    import torch

    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, FILTERS, KERNEL, STRIDE, bias=False),
        torch.nn.ReLU(),
        torch.nn.AvgPool2d(POOL),
        torch.nn.Flatten(),
        torch.nn.Linear(*weights.matrix.shape),
        torch.nn.Softmax(1),
    ).eval()
    network[0].weight.data = torch.from_numpy(weights.filters)
    network[4].weight.data = torch.from_numpy(weights.matrix.T.copy())
    network[4].bias.data = torch.from_numpy(weights.bias)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that there are newer formats
        torch.jit.save(torch.jit.trace(network, torch.zeros(1, 1, SIZE, SIZE)), path / "model.pt")


def write_savedmodel(weights: Weights, path: Path) -> None:
    import tensorflow as tf

    def run(images: tf.Tensor) -> dict[str, tf.Tensor]:
        # Channels last, which convolutions on a CPU require.
        last = tf.transpose(images, [0, 2, 3, 1])
        filters = weights.filters.transpose(2, 3, 1, 0)
        maps = tf.nn.relu(tf.nn.conv2d(last, filters, STRIDE, "VALID"))
        means = tf.transpose(tf.nn.avg_pool2d(maps, POOL, POOL, "VALID"), [0, 3, 1, 2])
        features = tf.reshape(means, [-1, weights.matrix.shape[0]])
        return {"KIND": tf.nn.softmax(features @ weights.matrix + weights.bias)}

    module = tf.Module()
    module.run = tf.function(run)
    spec = tf.TensorSpec([None, 1, SIZE, SIZE], tf.float32, name="IMAGE")
    signature = module.run.get_concrete_function(spec)
    tf.saved_model.save(module, str(path / "model.savedmodel"), signatures=signature)


FORMATS = {
    "onnx": (write_onnx, "onnxruntime_onnx"),
    "torchscript": (write_torchscript, "pytorch_libtorch"),
    "savedmodel": (write_savedmodel, "tensorflow_savedmodel"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("repository", type=Path)
    parser.add_argument("formats", nargs="*", default=["onnx", "torchscript"], metavar="FORMAT")
    arguments = parser.parse_args()
    unknown = set(arguments.formats) - set(FORMATS)
    if unknown:
        parser.error(f"there is no format {', '.join(unknown)}, there is {', '.join(FORMATS)}")
    weights = Weights()
    for name in arguments.formats:
        write, platform = FORMATS[name]
        folder = arguments.repository / f"shapes_{name}"
        (folder / "1").mkdir(parents=True, exist_ok=True)
        write(weights, folder / "1")
        (folder / "kinds.txt").write_text("".join(f"{kind}\n" for kind in KINDS))
        (folder / "config.pbtxt").write_text(CONFIG.format(what=name, platform=platform))
    made = ", ".join(f"shapes_{name}" for name in arguments.formats)
    print(f"{arguments.repository} has {made}")


if __name__ == "__main__":
    main()
