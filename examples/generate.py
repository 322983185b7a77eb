"""Client of `generate`: prints the tokens of a text as they arrive."""

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--tokens", type=int, default=40)
    parser.add_argument("--seed", type=int, default=8)
    parser.add_argument("prompt", nargs="?", default="Alice was")
    arguments = parser.parse_args()
    prompt = np.array([arguments.prompt.encode()], dtype=np.object_)
    most = np.array([arguments.tokens], dtype=np.int32)
    seed = np.array([arguments.seed], dtype=np.int64)
    inputs = [
        grpcclient.InferInput("PROMPT", [1], "BYTES").set_data_from_numpy(prompt),
        grpcclient.InferInput("MAX_TOKENS", [1], "INT32").set_data_from_numpy(most),
        grpcclient.InferInput("SEED", [1], "INT64").set_data_from_numpy(seed),
    ]
    answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
    with grpcclient.InferenceServerClient(arguments.url) as client:
        client.start_stream(lambda result, error: answers.put((result, error)))
        client.async_stream_infer("generate", inputs, enable_empty_final_response=True)
        print(arguments.prompt, end="", flush=True)
        while True:
            result, error = answers.get(timeout=60)
            if error is not None:
                raise SystemExit(error)
            if result.get_response().parameters["triton_final_response"].bool_param:
                break
            print(result.as_numpy("TOKEN")[0].decode(), end="", flush=True)
    print()


if __name__ == "__main__":
    main()
