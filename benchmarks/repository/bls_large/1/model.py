"""Sends ten BLS requests of 4 MB for each request."""

import numpy as np

import triton_python_backend_utils as pb_utils

CALLS = 10
ELEMENTS = 1 << 20


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer() for _ in requests]

    def answer(self):
        for number in range(CALLS):
            array = np.full(ELEMENTS, number, dtype=np.float32)
            response = pb_utils.InferenceRequest(
                model_name="identity_fp32",
                requested_output_names=["OUTPUT0"],
                inputs=[pb_utils.Tensor("INPUT0", array)],
            ).exec()
            if response.has_error():
                raise pb_utils.TritonModelException(response.error().message())
            last = response.output_tensors()[0].as_numpy()[-1:]
            if last[0] != number:
                raise pb_utils.TritonModelException("wrong answer")
        return pb_utils.InferenceResponse([pb_utils.Tensor("OUTPUT0", last)])
