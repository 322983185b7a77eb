"""Formats sizes for people, with a package that only this model has."""

import humanize
import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            sizes = pb_utils.get_input_tensor_by_name(request, "BYTES").as_numpy()
            texts = [humanize.naturalsize(int(size)).encode() for size in sizes]
            tensor = pb_utils.Tensor("TEXT", np.array(texts, dtype=np.object_))
            responses.append(pb_utils.InferenceResponse([tensor]))
        return responses
