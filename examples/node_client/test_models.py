"""Tests the models in this process, without a server."""

import numpy as np

from pbhost import testing


def test_each_pair_of_a_batch_has_its_cosine():
    a, b = np.array([[1, 2, 3], [1, 0, 0]]), np.array([[2, 4, 6], [0, 5, 0]])
    with testing.load("models/similarity") as model:
        cosines = model.infer({"A": a.astype("float32"), "B": b.astype("float32")})["COSINE"]
    np.testing.assert_allclose(cosines, [[1], [0]], atol=1e-6)


def test_a_word_is_spelled_letter_by_letter():
    with testing.load("models/spell") as model:
        parts = list(model.stream({"WORD": np.array(["Grüße".encode()], np.object_)}))
    assert [part["LETTER"][0].decode() for part in parts] == list("Grüße")
