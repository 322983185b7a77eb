"""Builds a plan for the GPU of this machine: the kind of a flower from four lengths."""

from pathlib import Path

import numpy as np
import tensorrt as trt

WEIGHTS = np.array(
    [[-0.42, 0.53, -0.11], [0.97, -0.32, -0.65], [-2.52, -0.2, 2.72], [-1.08, -0.94, 2.02]],
    np.float32,
)
BIAS = np.array([[9.84, 2.22, -12.06]], np.float32)
LARGEST = 64  # rows in a batch


def main() -> None:
    builder = trt.Builder(trt.Logger(trt.Logger.ERROR))
    typed = trt.NetworkDefinitionCreationFlag.STRONGLY_TYPED
    network = builder.create_network(1 << int(typed))

    flower = network.add_input("FLOWER", trt.float32, (-1, 4))  # -1: the batch
    weights = network.add_constant(WEIGHTS.shape, WEIGHTS).get_output(0)
    bias = network.add_constant(BIAS.shape, BIAS).get_output(0)
    plain = trt.MatrixOperation.NONE
    product = network.add_matrix_multiply(flower, plain, weights, plain).get_output(0)
    scores = network.add_elementwise(product, bias, trt.ElementWiseOperation.SUM).get_output(0)
    softmax = network.add_softmax(scores)
    softmax.axes = 1 << 1
    kind = softmax.get_output(0)
    kind.name = "KIND"
    network.mark_output(kind)

    profile = builder.create_optimization_profile()
    profile.set_shape("FLOWER", (1, 4), (8, 4), (LARGEST, 4))  # least, best and most
    config = builder.create_builder_config()
    config.add_optimization_profile(profile)
    plan = builder.build_serialized_network(network, config)
    if plan is None:
        raise SystemExit("TensorRT could not build the network")
    file = Path("models/flowers/1/model.plan")
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(bytes(plan))
    print(file)


if __name__ == "__main__":
    main()
