"""Client of `long_job`: cancels a job that takes too long, and completes a shorter one."""

import argparse
import queue
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    url = parser.parse_args().url
    for limit, patience in ((10**11, 3), (2 * 10**6, 100)):
        answers: queue.Queue[tuple[Any, Exception | None]] = queue.Queue()
        number = np.array([limit], dtype=np.int64)
        tensor = grpcclient.InferInput("LIMIT", [1], "INT64").set_data_from_numpy(number)
        with grpcclient.InferenceServerClient(url) as client:
            client.start_stream(lambda result, error, put=answers.put: put((result, error)))
            client.async_stream_infer("long_job", [tensor], enable_empty_final_response=True)
            print(f"primes below {limit}:")
            for _ in range(patience):
                result, error = answers.get(timeout=60)
                if error is not None:
                    raise SystemExit(error)
                if result.get_response().parameters["triton_final_response"].bool_param:
                    print("  finished")
                    break
                done = 100 * result.as_numpy("DONE")[0]
                print(f"  {result.as_numpy('PRIMES')[0]} after {done:.4f} %", flush=True)
            else:
                client.stop_stream(cancel_requests=True)
                print("  cancelled")


if __name__ == "__main__":
    main()
