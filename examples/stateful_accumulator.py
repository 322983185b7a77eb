"""Client of `stateful_accumulator`: runs two sequences at the same time, each with its own sum."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient

VALUES = {"anna": [1, 2, 3], "bert": [100, 50, 25]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        for step in range(3):
            for name, values in VALUES.items():
                value = np.array([[values[step]]], dtype=np.int32)
                result = client.infer(
                    "stateful_accumulator",
                    [grpcclient.InferInput("VALUE", [1, 1], "INT32").set_data_from_numpy(value)],
                    sequence_id=name,
                    sequence_start=step == 0,
                    sequence_end=step == 2,
                )
                print(f"{name}: {result.as_numpy('SUM')[0][0]}")


if __name__ == "__main__":
    main()
