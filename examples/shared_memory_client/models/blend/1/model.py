"""Blends two images of the same size."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.respond(request) for request in requests]

    def respond(self, request):
        first, second = pb_utils.get_input_tensor_by_name(request, "IMAGES").as_numpy()
        (share,) = pb_utils.get_input_tensor_by_name(request, "SHARE").as_numpy()
        blended = (first * (1 - share) + second * share).astype(np.uint8)
        return pb_utils.InferenceResponse([pb_utils.Tensor("BLENDED", blended)])
