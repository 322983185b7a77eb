"""Sends blocking BLS requests from `execute` or from threads, and tells how long they took."""

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            workers, count, elements, streamed = map(int, request.inputs()[0].as_numpy())
            started = time.perf_counter()
            if workers:
                with ThreadPoolExecutor(workers) as threads:
                    for done in [
                        threads.submit(self.call, count, elements, streamed) for _ in range(workers)
                    ]:
                        done.result()
            else:
                self.call(count, elements, streamed)
            seconds = np.array([time.perf_counter() - started])
            responses.append(pb_utils.InferenceResponse([pb_utils.Tensor("SECONDS", seconds)]))
        return responses

    def call(self, count, elements, streamed):
        """Sends `count` requests in turn; with `streamed`, each gets that many responses."""
        array = np.zeros(elements, dtype=np.float32)
        if streamed:
            array = np.array([streamed], dtype=np.int32)
        for _ in range(count):
            request = pb_utils.InferenceRequest(
                model_name="repeat" if streamed else "identity_fp32",
                requested_output_names=["OUT" if streamed else "OUTPUT0"],
                inputs=[pb_utils.Tensor("COUNT" if streamed else "INPUT0", array)],
            )
            responses = request.exec(decoupled=True) if streamed else [request.exec()]
            for response in responses:
                if response.has_error():
                    raise pb_utils.TritonModelException(response.error().message())
