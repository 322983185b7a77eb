"""Client of `multi_file`: converts temperatures from Celsius to Fahrenheit."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    celsius = np.array([-40, 0, 36.6, 100], dtype=np.float64)
    tensor = grpcclient.InferInput("CELSIUS", celsius.shape, "FP64").set_data_from_numpy(celsius)
    with grpcclient.InferenceServerClient(url) as client:
        fahrenheit = client.infer("multi_file", [tensor]).as_numpy("FAHRENHEIT")
    print(f"{celsius} in Celsius are {fahrenheit} in Fahrenheit")


if __name__ == "__main__":
    main()
