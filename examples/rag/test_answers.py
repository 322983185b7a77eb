"""Tests the pipeline in this process, without a server."""

import numpy as np
import pytest

from pbhost import testing


@pytest.fixture(scope="module")
def models():
    with (
        testing.load("models/embedder") as embedder,
        testing.load("models/passages", models={"embedder": embedder}) as passages,
        testing.load("models/writer") as writer,
    ):
        yield {"embedder": embedder, "passages": passages, "writer": writer}


def ask(model, question):
    parts = list(model.stream({"prompt": np.array([question.encode()], np.object_)}))
    return b"".join(part["text"][0] for part in parts).decode().strip(), parts


@pytest.mark.parametrize(
    ("question", "answer"),
    [
        ("How long are books lent?", "Books are lent for four weeks."),
        ("Where may I use my laptop?", "Laptops may be used on the first floor, where the"),
        ("Is there a club for children?", "Children may join the reading club on Wednesdays"),
    ],
)
def test_questions_are_answered_from_the_passages(models, question, answer):
    with testing.load("models/answers", models=models) as pipeline:
        text, parts = ask(pipeline, question)
    assert text.startswith(answer)
    assert all(text in part["source"][0].decode() for part in parts)


def test_an_error_of_the_search_is_that_of_the_pipeline(models):
    def broken(request):
        raise RuntimeError("the index is gone")

    with testing.load("models/answers", models={**models, "passages": broken}) as pipeline:
        with pytest.raises(Exception, match="the index is gone"):
            ask(pipeline, "When does it open?")
