"""Decodes an image file to an array with ink 1 and paper 0, for dark and for light text."""

import io

import numpy as np
from PIL import Image

import triton_python_backend_utils as pb_utils


def picture(data):
    """Pad to shape (1, 1, H, W) with multiples of 4, because the detector uses 4 by 4 blocks."""
    grey = np.asarray(Image.open(io.BytesIO(data)).convert("L"), np.float32)
    low, paper, high = (float(each) for each in (grey.min(), np.median(grey), grey.max()))
    ink = low if paper - low > high - paper else high
    ready = np.clip((grey - paper) / ((ink - paper) or 1), 0, 1)
    height, width = ready.shape
    return np.pad(ready, ((0, -height % 4), (0, -width % 4)))[None, None]


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        data = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        try:
            ready = picture(data.tobytes())
        except OSError:
            text = f"IMAGE must be a whole image file, such as JPEG or PNG, got {len(data)} bytes"
            wrong = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=wrong)
        return pb_utils.InferenceResponse([pb_utils.Tensor("PICTURE", ready)])
