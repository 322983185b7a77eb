"""Compares the plan with NumPy, in this process, without a server. Run build.py first."""

import numpy as np
import pytest
from build import BIAS, LARGEST, WEIGHTS

from pbhost import testing


@pytest.fixture(scope="module")
def model():
    with testing.load("models/flowers") as model:
        yield model


@pytest.mark.parametrize("rows", [1, 8, LARGEST])
def test_a_batch_has_the_probabilities_that_numpy_computes(model, rows):
    flowers = np.random.default_rng(1).uniform(0, 7, (rows, 4)).astype(np.float32)
    powers = np.exp(flowers @ WEIGHTS + BIAS)
    expected = powers / powers.sum(axis=1, keepdims=True)
    np.testing.assert_allclose(model.infer({"FLOWER": flowers})["KIND"], expected, atol=1e-2)
