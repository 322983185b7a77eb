"""Converts words to capitals, inverts levels and a flag, negates offsets, makes an image grey."""

import numpy as np

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        given = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        words = np.array([word.upper() for word in given["WORDS"]], dtype=np.object_)
        outputs = {
            "WORDS": words,
            "LEVELS": 255 - given["LEVELS"],
            "OFFSETS": -given["OFFSETS"],
            "GREY": given["IMAGE"].mean(axis=2),
            "MIRROR": ~given["MIRROR"],
        }
        return pb_utils.InferenceResponse([pb_utils.Tensor(*item) for item in outputs.items()])
