"""Client of `bls_loop`: a model that calls another model until a condition is true."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    with grpcclient.InferenceServerClient(url) as client:
        for start in ([1, 2, 3, 4], [-1, -2, -3, -4]):
            value = np.array(start, dtype=np.float32)
            limit = np.array([100], dtype=np.float32)
            inputs = [
                grpcclient.InferInput("START", value.shape, "FP32").set_data_from_numpy(value),
                grpcclient.InferInput("LIMIT", limit.shape, "FP32").set_data_from_numpy(limit),
            ]
            result = client.infer("bls_loop", inputs)
            steps = result.as_numpy("STEPS")[0]
            print(f"{value} until {limit[0]:g}: {result.as_numpy('VALUE')} after {steps} steps")


if __name__ == "__main__":
    main()
