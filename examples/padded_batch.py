"""Client of `padded_batch`: sends sequences of different lengths that run as one batch."""

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient

SEQUENCES = [[1, 2, 3], [10], [5, 7], [1, 1, 1, 5]]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(parser.parse_args().url) as client:
        for index, sequence in enumerate(SEQUENCES):
            values = np.array([sequence], dtype=np.float32)
            tensor = grpcclient.InferInput("VALUES", values.shape, "FP32")
            client.async_infer(
                "padded_batch",
                [tensor.set_data_from_numpy(values)],
                lambda result, error: answers.put((result, error)),
                request_id=str(index),
            )
        results = {}
        for _ in SEQUENCES:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise error
            results[int(result.get_response().id)] = result
    for index, sequence in enumerate(SEQUENCES):
        print(sequence, "->", results[index].as_numpy("CENTRED")[0])


if __name__ == "__main__":
    main()
