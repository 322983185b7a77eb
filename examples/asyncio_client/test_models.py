"""Tests the models in this process, without a server."""

import numpy as np
import pytest

from pbhost import testing


def test_cities_of_a_batch_are_looked_up():
    with testing.load("models/lookup") as lookup:
        cities = np.array([["Oslo"], ["Suva"]], np.object_)
        assert lookup.infer({"CITY": cities})["POPULATION"].tolist() == [[717_710], [93_970]]
        with pytest.raises(Exception, match="no such city: Atlantis"):
            lookup.infer({"CITY": np.array([["Atlantis"]], np.object_)})


def test_the_ticker_counts():
    with testing.load("models/ticker") as ticker:
        (responses,) = ticker.submit([ticker.request({"EVERY": np.zeros(1, np.float32)})])
        assert [next(responses).output_tensors()[0].as_numpy()[0] for _ in range(3)] == [1, 2, 3]
        responses.cancel()
