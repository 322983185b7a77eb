"""Client of `repeat`: sends one request and prints each of its responses as it arrives."""

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    arrays = {
        "IN": np.array([4, 2, 0, 1], dtype=np.int32),
        "DELAY": np.array([100, 200, 300, 400], dtype=np.uint32),  # milliseconds
        "WAIT": np.array([0], dtype=np.uint32),
    }
    inputs = [
        grpcclient.InferInput(
            name, array.shape, "INT32" if name == "IN" else "UINT32"
        ).set_data_from_numpy(array)
        for name, array in arrays.items()
    ]
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("repeat", inputs, enable_empty_final_response=True)
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise SystemExit(error)
            if result.get_response().parameters["triton_final_response"].bool_param:
                print("that was all")
                return
            print(f"response {result.as_numpy('IDX')[0]}: {result.as_numpy('OUT')[0]}", flush=True)


if __name__ == "__main__":
    main()
