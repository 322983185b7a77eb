"""Client of `iris_onnx` and `iris_torch`: classifies three flowers with both models."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient

KINDS = ("setosa", "versicolor", "virginica")
FLOWERS = np.array([[5.1, 3.5, 1.4, 0.2], [6.0, 2.7, 4.2, 1.3], [6.9, 3.1, 5.8, 2.1]], np.float32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    flowers = grpcclient.InferInput("FLOWER", FLOWERS.shape, "FP32").set_data_from_numpy(FLOWERS)
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        for model in ("iris_onnx", "iris_torch"):
            (output,) = client.get_model_metadata(model).outputs
            result = client.infer(model, [flowers]).as_numpy(output.name)
            print(f"{model}: {', '.join(KINDS[index] for index in result.argmax(axis=1))}")


if __name__ == "__main__":
    main()
