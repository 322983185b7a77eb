"""Tests the model in this process, without a server."""

import numpy as np

from pbhost import testing


def test_images_are_blended():
    images = np.stack([np.zeros((2, 3, 3), np.uint8), np.full((2, 3, 3), 200, np.uint8)])
    with testing.load("models/blend") as model:
        blended = model.infer({"IMAGES": images, "SHARE": np.array([0.25], np.float32)})["BLENDED"]
    assert blended.shape == (2, 3, 3) and (blended == 50).all()
