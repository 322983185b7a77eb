"""Tests the model in this process, without a server. Run train.py first."""

from sklearn.datasets import load_iris

from pbhost import testing


def test_most_flowers_are_known():
    flowers = load_iris()
    with testing.load("models/iris") as model:
        kinds = model.infer({"LENGTHS": flowers.data.astype("float32")})["KIND"]
    expected = flowers.target_names[flowers.target]
    assert (kinds[:, 0].astype(str) == expected).mean() > 0.95
