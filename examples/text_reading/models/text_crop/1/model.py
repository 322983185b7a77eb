"""Crops words from a picture where the heat map shows text; all crops have 24 rows."""

import numpy as np
from PIL import Image

import triton_python_backend_utils as pb_utils

HEIGHT = 24
CELL = 4  # pixels of the picture per pixel of the heat map, in each direction
GAP = 0.7  # share of a word's height: a larger gap separates two words


def runs(filled, gap=1):
    """(begin, end) of each run of True. Gaps of fewer than `gap` False do not split a run."""
    places = np.flatnonzero(filled)
    if not len(places):
        return []
    parts = np.split(places, np.flatnonzero(np.diff(places) > gap) + 1)
    return [(part[0], part[-1] + 1) for part in parts]


def words(picture, heat):
    """Left, top, right and bottom of each word, in reading order."""
    found = []
    for top, bottom in runs((heat > 0.5).any(axis=1)):
        for left, right in runs((heat[top:bottom] > 0.5).any(axis=0)):
            ink = picture[top * CELL : bottom * CELL, left * CELL : right * CELL] > 0.5
            for above, below in runs(ink.any(axis=1)):
                line = ink[above:below]
                for begin, end in runs(line.any(axis=0), gap=max(1, GAP * (below - above))):
                    high = np.flatnonzero(line[:, begin:end].any(axis=1))
                    x, y = left * CELL, top * CELL + above
                    found.append((x + begin, y + high[0], x + end, y + high[-1] + 1))
    return np.array(found, dtype=np.int32).reshape(-1, 4)


def crop(picture, box):
    """Crop a word and scale it to the common height."""
    left, top, right, bottom = box
    width = max(1, round((right - left) * HEIGHT / (bottom - top)))
    part = Image.fromarray(picture[top:bottom, left:right])
    return np.asarray(part.resize((width, HEIGHT), Image.Resampling.BILINEAR))


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        picture = pb_utils.get_input_tensor_by_name(request, "PICTURE").as_numpy()[0, 0]
        heat = pb_utils.get_input_tensor_by_name(request, "HEAT").as_numpy()[0, 0]
        boxes = words(picture, heat)
        parts = [crop(picture, box) for box in boxes]
        width = max([part.shape[1] for part in parts], default=HEIGHT)
        crops = np.zeros((len(parts), 1, HEIGHT, width), np.float32)
        for index, part in enumerate(parts):
            crops[index, 0, :, : part.shape[1]] = part
        return pb_utils.InferenceResponse(
            [pb_utils.Tensor("BOXES", boxes), pb_utils.Tensor("CROPS", crops)]
        )
