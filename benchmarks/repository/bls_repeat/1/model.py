"""Sends a BLS request to the decoupled model repeat and returns the last of its responses."""

import numpy as np

import triton_python_backend_utils as pb_utils

RESPONSES = 1000


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer() for _ in requests]

    def answer(self):
        count = np.array([RESPONSES], dtype=np.int32)
        request = pb_utils.InferenceRequest(
            model_name="repeat",
            requested_output_names=["OUT"],
            inputs=[pb_utils.Tensor("COUNT", count)],
        )
        received = 0
        for response in request.exec(decoupled=True):
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            if response.output_tensors():
                received += 1
                array = response.output_tensors()[0].as_numpy()
        if received != RESPONSES:
            raise pb_utils.TritonModelException(f"{received} responses")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", array)])
