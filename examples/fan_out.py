"""Client of `fan_out`: sends one request that three models answer together."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    celsius = np.array([18, 20, 21, 25], dtype=np.float64)
    note = np.array([b"measured in the shade"], dtype=np.object_)
    inputs = [
        grpcclient.InferInput("CELSIUS", [4], "FP64").set_data_from_numpy(celsius),
        grpcclient.InferInput("NOTE", [1], "BYTES").set_data_from_numpy(note),
    ]
    with grpcclient.InferenceServerClient(url) as client:
        result = client.infer("fan_out", inputs)
    print(f"{celsius} in Fahrenheit: {result.as_numpy('FAHRENHEIT')}")
    print(f"from their mean: {result.as_numpy('DEVIATION')}")
    print(f"words in the note: {result.as_numpy('WORDS')[0]}")


if __name__ == "__main__":
    main()
