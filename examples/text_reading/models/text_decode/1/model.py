"""Converts the probabilities of letters to text: takes the best letters that do not overlap."""

from pathlib import Path

import numpy as np

import triton_python_backend_utils as pb_utils

ALPHABET = (Path(__file__).parent / "alphabet.txt").read_text()


APART = 15  # columns of a crop: the minimum distance between the starts of two letters


def text(chances):
    """Decode one word; class 0 is "no letter"."""
    sure = chances[:, 1:].max(axis=1) - chances[:, 0]
    found = {}
    for place in np.argsort(-sure, kind="stable"):
        if sure[place] > 0 and all(abs(place - other) >= APART for other in found):
            found[place] = ALPHABET[chances[place, 1:].argmax()]
    return "".join(found[place] for place in sorted(found))


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        chances = pb_utils.get_input_tensor_by_name(request, "CHANCES").as_numpy()
        texts = np.array([text(each).encode() for each in chances], dtype=np.object_)
        return pb_utils.InferenceResponse([pb_utils.Tensor("TEXT", texts)])
