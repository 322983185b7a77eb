"""Generates pictures by diffusion: encodes a text, removes noise step by step, decodes."""

import math
from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

WORDS = (Path(__file__).parent / "words.txt").read_text().split("\n")
MOST_STEPS = 1000


def ask(model, output, **inputs):
    """Call a model and return one output."""
    tensors = [pb_utils.Tensor(name, array) for name, array in inputs.items()]
    request = pb_utils.InferenceRequest(
        model_name=model, requested_output_names=[output], inputs=tensors
    )
    response = request.exec()
    if response.has_error():
        raise pb_utils.TritonModelException(response.error().message())
    return pb_utils.get_output_tensor_by_name(response, output).as_numpy()


def one(request, name, otherwise):
    """The only element of an optional input, or the default."""
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return otherwise if tensor is None else tensor.as_numpy()[0]


def left(progress):
    """The share of the picture in the noisy one, from a little at time 0 to 1 at time 1."""
    return math.cos((1 - progress) * 0.49 * math.pi) ** 2


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        words = one(request, "PROMPT", b"").decode().lower().split()
        steps, seed = int(one(request, "STEPS", 20)), int(one(request, "SEED", 0))
        if not 1 <= steps <= MOST_STEPS:
            text = f"STEPS must be from 1 to {MOST_STEPS}, got {steps}"
            wrong = pb_utils.TritonError(text, pb_utils.TritonError.INVALID_ARG)
            return pb_utils.InferenceResponse(error=wrong)
        tokens = np.array([[WORDS.index(word) if word in WORDS else 0 for word in words or [""]]])
        meaning = ask("picture_encoder", "MEANING", TOKENS=tokens)
        random = np.random.default_rng(abs(seed))
        picture = random.standard_normal((1, 3, 16, 16), dtype=np.float32)
        for step in range(steps):
            now, then = left(step / steps), left((step + 1) / steps)
            level = np.array([now], np.float32)
            noise = ask("picture_denoiser", "NOISE", NOISY=picture, MEANING=meaning, LEVEL=level)
            clean = (picture - math.sqrt(1 - now) * noise) / math.sqrt(now)
            picture = math.sqrt(then) * clean + math.sqrt(1 - then) * noise
        image = pb_utils.Tensor("IMAGE", ask("picture_decoder", "IMAGE", LATENT=picture))
        return pb_utils.InferenceResponse([image])
