"""Tests the model in this process, which needs the model's packages."""

import numpy as np

from pbhost import testing


def test_sizes_are_readable():
    with testing.load("models/readable") as model:
        texts = model.infer({"BYTES": np.array([1, 4096], np.int64)})["TEXT"]
    assert texts.tolist() == [b"1 Byte", b"4.1 kB"]
