"""Tests the pipeline in this process, without a server."""

import shutil

import numpy as np
import pytest

import triton_python_backend_utils as pb_utils
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


def test_passages_may_be_more_than_one_batch(models, tmp_path):
    shutil.copytree("models/passages", tmp_path / "passages")
    texts = [f"Shelf {number} is full." for number in range(70)]
    (tmp_path / "passages" / "1" / "passages.txt").write_text("\n".join(texts))

    def embedder(request):
        batch = pb_utils.get_input_tensor_by_name(request, "text").as_numpy()
        assert len(batch) <= 32  # what a server accepts
        vectors = models["embedder"].infer({"text": batch})["embedding"]
        return pb_utils.InferenceResponse([pb_utils.Tensor("embedding", vectors)])

    question = {"text": np.array([[texts[-1].encode()]], np.object_)}
    vector = models["embedder"].infer(question)["embedding"]
    with testing.load(tmp_path / "passages", models={"embedder": embedder}) as passages:
        found = passages.infer({"EMBEDDING": vector})["PASSAGES"]
    assert found[0, 0].decode() == texts[-1]


def test_an_error_of_the_search_is_that_of_the_pipeline(models):
    def broken(request):
        raise RuntimeError("the index is gone")

    with testing.load("models/answers", models={**models, "passages": broken}) as pipeline:
        with pytest.raises(Exception, match="the index is gone"):
            ask(pipeline, "When does it open?")
