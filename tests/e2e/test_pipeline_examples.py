"""The examples of frameworks: classifiers, and pipelines through several of them."""

from __future__ import annotations

import importlib.util
import io
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from tests.clients import Client, infer_error, tensor
from tests.conftest import ROOT, RepositoryBuilder, RunningHost, Serve
from tests.lazy_import import lazy_import
from tests.readmes import walkthroughs, without_digits, write

image_files = lazy_import("PIL.Image", "torch", "onnx", "onnxruntime")

EXAMPLES = {
    name: walkthroughs(name)[0]
    for name in ("frameworks", "image_classifier", "text_reading", "diffusion")
}
READERS = ["text_reader", "text_reader_bls"]


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    """Serves the models of all examples."""
    write(EXAMPLES.values(), module_repository.path)
    return module_serve(module_repository).wait_started()


@pytest.fixture
def client(host: RunningHost) -> Iterator[Client]:
    with host.client() as client:
        yield client


def script_of(example: str, name: str) -> ModuleType:
    """A script of an example, as a module."""
    path = ROOT / "examples" / example / f"{name}.py"
    specification = importlib.util.spec_from_file_location(f"{example}_{name}", path)
    assert specification is not None and specification.loader is not None
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def read(client: Client, model: str, data: bytes) -> tuple[list[str], Any]:
    result = client.infer(model, [tensor("IMAGE", np.frombuffer(data, np.uint8))])
    return [word.decode() for word in result.as_numpy("TEXT")], result.as_numpy("BOXES")


def requests_of(client: Client, model: str) -> int:
    statistics = client.get_inference_statistics(model, as_json=True)["model_stats"][0]
    return int(statistics.get("inference_count", 0))


@pytest.mark.parametrize("example", EXAMPLES)
def test_the_readmes_commands_work(host: RunningHost, example: str) -> None:
    shown, answer = EXAMPLES[example].expected, EXAMPLES[example].answer(host)
    assert without_digits(answer) == without_digits(shown)


@pytest.mark.parametrize("model", READERS)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_text_that_was_drawn_is_read(client: Client, model: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    letters = np.array(list("ABCDEFGHIJKLMNOPRSTUVWXYZ"))
    lines = tuple(f"{''.join(random.choice(letters, 5))} {seed}08{seed}" for _ in range(2))
    words, boxes = read(client, model, script_of("text_reading", "read").sign(lines, seed))
    assert words == " ".join(lines).split()
    assert boxes.shape == (len(words), 4)


@pytest.mark.parametrize("model", READERS)
def test_an_image_without_text_has_no_words(client: Client, model: str) -> None:
    file = io.BytesIO()
    image_files.new("RGB", (90, 50), (30, 60, 90)).save(file, "png")
    asked = requests_of(client, "text_recogniser")
    assert read(client, model, file.getvalue())[0] == []
    more = requests_of(client, "text_recogniser") - asked
    assert more == (0 if model == "text_reader_bls" else 1)


@pytest.mark.parametrize("model", READERS)
def test_bytes_that_are_no_image_are_an_invalid_argument(client: Client, model: str) -> None:
    status, text = infer_error(read, client, model, b"no image")
    assert status == "StatusCode.INVALID_ARGUMENT"
    assert text.endswith("IMAGE must be a whole image file, such as JPEG or PNG, got 8 bytes")


def paint(client: Client, prompt: str, steps: int, seed: int = 0) -> Any:
    inputs = {
        "PROMPT": np.array([prompt.encode()], dtype=np.object_),
        "STEPS": np.array([steps], np.int32),
        "SEED": np.array([seed], np.int64),
    }
    given = [tensor(name, array) for name, array in inputs.items()]
    return client.infer("picture_maker", given).as_numpy("IMAGE")


def test_the_denoiser_runs_once_per_step(client: Client) -> None:
    before = requests_of(client, "picture_denoiser")
    image = paint(client, "a blue square", 7)
    assert requests_of(client, "picture_denoiser") - before == 7
    assert image.shape == (64, 64, 3)
    assert image[32, 32].tolist() == [0, 0, 255]
    assert image[1, 1].tolist() == [0, 0, 0]


def test_the_painted_picture_depends_on_the_words(client: Client) -> None:
    same = [paint(client, "green stripes", 5, seed) for seed in (1, 2)]
    np.testing.assert_array_equal(*same)
    assert (paint(client, "green disc", 5) != same[0]).any()


def test_a_number_of_steps_that_makes_no_sense_is_refused(client: Client) -> None:
    status, text = infer_error(paint, client, "a red disc", 0)
    assert (status, text) == (
        "StatusCode.INVALID_ARGUMENT",
        "STEPS must be from 1 to 1000, got 0",
    )
