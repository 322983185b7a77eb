"""Tests the model in this process, without a server. Run train.py first."""

import numpy as np
import pytest

from pbhost import testing


@pytest.fixture(scope="module")
def model():
    with testing.load("models/delivery") as model:
        yield model


def table(distance=6.0, hour=12, vehicle=b"car"):
    return {
        "DISTANCE": np.array([[distance]], np.float32),
        "HOUR": np.array([[hour]], np.int32),
        "VEHICLE": np.array([[vehicle]], np.object_),
    }


def test_cars_are_slower_in_the_afternoon(model):
    noon, afternoon = model.infer(table(hour=12)), model.infer(table(hour=17))
    assert noon["MINUTES"] + 3 < afternoon["MINUTES"]


def test_contributions_add_up_to_the_difference_from_the_mean(model):
    near, far = model.infer(table(distance=1)), model.infer(table(distance=14))
    difference = far["CONTRIBUTIONS"].sum() - near["CONTRIBUTIONS"].sum()
    assert far["MINUTES"] - near["MINUTES"] == pytest.approx(difference, abs=0.01)


def test_an_unknown_vehicle_is_a_missing_value(model):
    assert np.isfinite(model.infer(table(vehicle=b"balloon"))["MINUTES"]).all()
