"""Tests the model in this process, without a server. Run build.py first."""

import numpy as np
import pytest

from pbhost import testing


@pytest.fixture(scope="module")
def model():
    with testing.load("models/sentiment") as model:
        yield model


def text(value):
    return {"TEXT": np.array([[value.encode()]], np.object_)}


@pytest.mark.parametrize(
    ("value", "label"), [("The film is fine", b"praise"), ("A play is POOR", b"blame")]
)
def test_a_text_has_its_label(model, value, label):
    assert model.infer(text(value))["LABEL"] == [[label]]


def test_requests_of_a_batch_have_responses_of_their_own(model):
    first, second = model.execute(
        [model.request(text(t)) for t in ("The film is fine", "A play is dull")]
    )
    labels = [response.output_tensors()[0].as_numpy()[0, 0] for response in (first, second)]
    assert labels == [b"praise", b"blame"]


def test_a_text_that_is_not_utf_8_does_not_fail_others(model):
    broken = {"TEXT": np.array([[b"\xff"]], np.object_)}
    requests = [model.request(broken), model.request(text("The film is fine"))]
    assert model.execute(requests)[1].output_tensors()[0].as_numpy()[0, 0] == b"praise"
