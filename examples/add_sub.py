"""Client of `add_sub`: two arrays in, their sum and difference out."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    a = np.array([[1, 2, 3, 4]], dtype=np.float32)
    b = np.array([[10, 20, 30, 40]], dtype=np.float32)
    inputs = [
        grpcclient.InferInput("INPUT0", a.shape, "FP32").set_data_from_numpy(a),
        grpcclient.InferInput("INPUT1", b.shape, "FP32").set_data_from_numpy(b),
    ]
    with grpcclient.InferenceServerClient(url) as client:
        result = client.infer("add_sub", inputs)
    print(f"{a} + {b} = {result.as_numpy('SUM')}")
    print(f"{a} - {b} = {result.as_numpy('DIFFERENCE')}")


if __name__ == "__main__":
    main()
