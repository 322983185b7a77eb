"""Joins words, sorts levels and offsets, mirrors an image if a flag is set, and judges it."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        grey = given["GREY"]
        outputs = {
            "CAPTION": np.array([b" ".join(given["WORDS"])], dtype=np.object_),
            "LEVELS": np.sort(given["LEVELS"]),
            "OFFSETS": np.sort(given["OFFSETS"]),
            "IMAGE": np.ascontiguousarray(grey[:, ::-1]) if given["MIRROR"][0] else grey,
            "BRIGHT": np.array([grey.mean() > 0.5]),
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])
