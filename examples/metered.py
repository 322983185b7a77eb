"""Client of `metered`: has texts reversed, then prints the model's metrics."""

import argparse
from urllib.request import urlopen

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--metrics", default="localhost:8002", help="the metrics port")
    arguments = parser.parse_args()
    texts = np.array(["stressed", "Grün".encode(), "never odd or even"], dtype=np.object_)
    tensor = grpcclient.InferInput("TEXT", texts.shape, "BYTES").set_data_from_numpy(texts)
    with grpcclient.InferenceServerClient(arguments.url) as client:
        for text in client.infer("metered", [tensor]).as_numpy("REVERSED"):
            print(text.decode())
    with urlopen(f"http://{arguments.metrics}/metrics", timeout=60) as response:
        for line in response.read().decode().splitlines():
            if line.startswith("reversed_"):
                print(line)


if __name__ == "__main__":
    main()
