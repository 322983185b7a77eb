"""A vision transformer in one Python model: from the image to the last hidden states."""

from pathlib import Path

import numpy as np
import torch
from PIL import Image
from transformers import ViTModel

import triton_python_backend_utils as pb_utils

SIZE = 224


def pixels(image):
    """Convert (height, width, 3) of 0 to 255 to (1, 3, 224, 224) of -1 to 1."""
    small = Image.fromarray(image).resize((SIZE, SIZE), Image.Resampling.BILINEAR)
    return (np.asarray(small, np.float32) / 127.5 - 1).transpose(2, 0, 1)[None]


class TritonPythonModel:
    def initialize(self, args):
        weights = Path(__file__).parent / "weights"
        self.network = ViTModel.from_pretrained(weights, add_pooling_layer=False).eval()

    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        image = pb_utils.get_input_tensor_by_name(request, "IMAGE").as_numpy()
        with torch.inference_mode():
            hidden = self.network(torch.from_numpy(pixels(image))).last_hidden_state
        return pb_utils.InferenceResponse([pb_utils.Tensor("HIDDEN", hidden.numpy())])
