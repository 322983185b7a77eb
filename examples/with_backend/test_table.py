"""Tests the backend with the model in this process, without a server."""

import numpy as np
import pytest

from pbhost import testing


@pytest.fixture(scope="module")
def elements():
    with testing.load("models/elements", backend="backends/table") as model:
        yield model


def test_rows_are_in_the_order_of_the_request(elements):
    found = elements.infer({"SYMBOL": np.array([b"O", b"H"], np.object_)})
    assert found["NAME"].tolist() == [b"oxygen", b"hydrogen"]
    assert found["NUMBER"].tolist() == [8, 1]


def test_a_row_that_is_missing_is_an_error(elements):
    with pytest.raises(Exception, match="the table has no row b'Xx'"):
        elements.infer({"SYMBOL": np.array([b"Xx"], np.object_)})
