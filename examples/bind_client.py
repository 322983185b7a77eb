"""Client of `bind_function.py`: a network of one layer, text, and a stream."""

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype


def tensor(name: str, array: np.ndarray) -> grpcclient.InferInput:
    made = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
    return made.set_data_from_numpy(array)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    with grpcclient.InferenceServerClient(url) as client:
        x = np.eye(4, dtype=np.float32)[:2]
        sharp = np.full((2, 1), 0.1, dtype=np.float32)
        for inputs in ([tensor("x", x)], [tensor("x", x), tensor("temperature", sharp)]):
            result = client.infer("linear", inputs)
            print(np.round(result.as_numpy("probabilities"), 2).tolist())
        text = np.array([["Köln".encode()], [b"Bonn"]], dtype=np.object_)
        shouted = client.infer("shout", [tensor("text", text)]).as_numpy("text")
        print([each.decode() for each in shouted[:, 0]])

        answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        client.start_stream(lambda result, error: answers.put((result, error)))
        start = np.array([[3]], dtype=np.int32)
        client.async_stream_infer(
            "countdown", [tensor("start", start)], enable_empty_final_response=True
        )
        while True:
            result, error = answers.get(timeout=30)
            if error is not None:
                raise error
            response = result.get_response()
            if response.parameters["triton_final_response"].bool_param and not response.outputs:
                break
            print(result.as_numpy("left").item(), end=" ")
        print("liftoff")
        client.stop_stream()


if __name__ == "__main__":
    main()
