"""Client of `warmed_up_model`: the model has answered a warm-up request before the first client."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    degrees = np.array([[0, 90, 180]], dtype=np.int32)
    tensor = grpcclient.InferInput("DEGREES", degrees.shape, "INT32").set_data_from_numpy(degrees)
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        result = client.infer("warmed_up_model", [tensor])
    before = not result.as_numpy("FIRST").any()
    print(f"the table was made before the first request: {before}")
    print(result.as_numpy("SINE")[0])


if __name__ == "__main__":
    main()
