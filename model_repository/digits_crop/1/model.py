"""Crops boxes from an image. Narrow boxes keep their proportions and are padded on the left."""

import numpy as np

import triton_python_backend_utils as pb_utils

HEIGHT, WIDTH = 32, 20


def crop(image, top, bottom, left, right):
    """Scale one box to 32 by 20 by nearest neighbour."""
    part = image[top:bottom, left:right]
    missing = round((bottom - top) * WIDTH / HEIGHT) - (right - left)
    if missing > 0:
        part = np.pad(part, ((0, 0), (missing, 0)))
    rows = np.arange(HEIGHT) * part.shape[0] // HEIGHT
    columns = np.arange(WIDTH) * part.shape[1] // WIDTH
    return part[rows][:, columns]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        boxes = pb_utils.get_input_tensor_by_name(request, "BOXES").as_numpy()
        crops = np.zeros((len(boxes), HEIGHT, WIDTH), dtype=np.uint8)
        for index, box in enumerate(boxes):
            crops[index] = crop(image, *box)
        return pb_utils.InferenceResponse([pb_utils.Tensor("CROPS", crops)])
