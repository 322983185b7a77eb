"""Scales an image to the size and value range of the network."""

import numpy as np
from PIL import Image

import triton_python_backend_utils as pb_utils

SIZE = 224


def pixels(image):
    """Convert (height, width, 3) of 0 to 255 to (1, 3, 224, 224) of -1 to 1."""
    small = Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return (np.asarray(small, np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        return pb_utils.InferenceResponse([pb_utils.Tensor("PIXELS", pixels(image))])
