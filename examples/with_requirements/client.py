"""Client of `readable`: converts sizes to readable text."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    sizes = np.array([1, 4096, 3 * 10**9], dtype=np.int64)
    tensor = grpcclient.InferInput("BYTES", sizes.shape, "INT64").set_data_from_numpy(sizes)
    with grpcclient.InferenceServerClient(url) as client:
        texts = client.infer("readable", [tensor]).as_numpy("TEXT")
    for size, text in zip(sizes, texts, strict=True):
        print(f"{size} bytes are {text.decode()}")


if __name__ == "__main__":
    main()
