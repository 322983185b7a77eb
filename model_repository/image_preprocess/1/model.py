"""Prepares images for a network with numpy: resize, crop, normalise, channels first."""

import numpy as np

import triton_python_backend_utils as pb_utils

SIDE = 224
MEAN = np.array([0.485, 0.456, 0.406], dtype=np.float32)
DEVIATION = np.array([0.229, 0.224, 0.225], dtype=np.float32)


def resize(image, height, width):
    """Resize with bilinear interpolation; pixel centres are aligned."""
    rows = (np.arange(height, dtype=np.float32) + 0.5) * image.shape[0] / height - 0.5
    columns = (np.arange(width, dtype=np.float32) + 0.5) * image.shape[1] / width - 0.5
    rows, columns = rows.clip(0, image.shape[0] - 1), columns.clip(0, image.shape[1] - 1)
    top, left = rows.astype(int), columns.astype(int)
    bottom = np.minimum(top + 1, image.shape[0] - 1)
    right = np.minimum(left + 1, image.shape[1] - 1)
    down, across = (rows - top)[:, None, None], (columns - left)[None, :, None]
    upper = image[top][:, left] * (1 - across) + image[top][:, right] * across
    lower = image[bottom][:, left] * (1 - across) + image[bottom][:, right] * across
    return upper * (1 - down) + lower * down


class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
            side = min(image.shape[:2])
            y, x = (image.shape[0] - side) // 2, (image.shape[1] - side) // 2
            square = image[y : y + side, x : x + side].astype(np.float32) / 255
            pixels = (resize(square, SIDE, SIDE) - MEAN) / DEVIATION
            output = pb_utils.Tensor("PIXELS", pixels.transpose(2, 0, 1).astype(np.float32))
            responses.append(pb_utils.InferenceResponse([output]))
        return responses
