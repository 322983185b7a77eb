"""Files as inputs, and pictures, on the page at /docs."""

from __future__ import annotations

import io
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from selenium import webdriver
from selenium.webdriver.common.by import By

from tests.browser import WebPage, complaints, open_browser
from tests.conftest import DEADLINE, RepositoryBuilder, RunningHost, Serve, wait_until

PICTURE = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        responses = []
        for request in requests:
            files = pb_utils.get_input_tensor_by_name(request, "FILES").as_numpy()
            pixels = np.zeros((8, 16, 3), np.uint8)
            pixels[:, :8] = (255, 0, 0)
            sizes = np.array([len(one) for one in files], np.int32)
            responses.append(pb_utils.InferenceResponse([
                pb_utils.Tensor("COPIES", files), pb_utils.Tensor("SIZES", sizes),
                pb_utils.Tensor("PIXELS", pixels),
                pb_utils.Tensor("PLANES", pixels.transpose(2, 0, 1).copy()),
            ]))
        return responses
"""
PICTURE_CONFIG = """
backend: "python"
input [ { name: "FILES" data_type: TYPE_STRING dims: [ -1 ] } ]
output [
    { name: "COPIES" data_type: TYPE_STRING dims: [ -1 ] },
    { name: "SIZES" data_type: TYPE_INT32 dims: [ -1 ] },
    { name: "PIXELS" data_type: TYPE_UINT8 dims: [ 8, 16, 3 ] },
    { name: "PLANES" data_type: TYPE_UINT8 dims: [ 3, 8, 16 ] }
]
"""
LINES = """
import numpy as np
import triton_python_backend_utils as pb_utils

class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            text = pb_utils.get_input_tensor_by_name(request, "TEXT").as_numpy()[0]
            for line in text.splitlines():
                array = np.array([line], dtype=np.object_)
                sender.send(pb_utils.InferenceResponse([pb_utils.Tensor("LINE", array)]))
            sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
"""
LINES_CONFIG = """
backend: "python"
input [ { name: "TEXT" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "LINE" data_type: TYPE_STRING dims: [ 1 ] } ]
model_transaction_policy { decoupled: true }
"""


@pytest.fixture(scope="module")
def host(module_repository: RepositoryBuilder, module_serve: Serve) -> RunningHost:
    module_repository.add("picture", PICTURE, PICTURE_CONFIG)
    module_repository.add("lines", LINES, LINES_CONFIG)
    return module_serve(module_repository).wait_started()


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(autouse=True)
def the_browser_has_nothing_to_complain_of(browser: webdriver.Chrome) -> Iterator[None]:
    """Scripts ran, and what the policy forbids was not tried."""
    yield
    assert not complaints(browser)


@pytest.fixture
def image(tmp_path: Path) -> Path:
    """A file of an image, whose name needs quotes in a shell."""
    path = tmp_path / "a cat's picture.png"
    content = io.BytesIO()
    Image.fromarray(np.full((10, 20, 3), 128, np.uint8)).save(content, "png")
    path.write_bytes(content.getvalue())
    return path


class FilePage(WebPage):
    """The page of a host about one of its models, with files chosen for an input."""

    def __init__(
        self, browser: webdriver.Chrome, host: RunningHost, model: str, *files: Path
    ) -> None:
        super().__init__(browser, host, f"/docs#{model}/1")
        self.wait_for("h2", f"^{model}$")
        chooser = browser.find_element(By.CSS_SELECTOR, "input[type=file]")
        chooser.send_keys("\n".join(map(str, files)))

    def picture_sizes(self, place: str) -> list[list[int]]:
        """Width and height of each picture below an element, once all are there."""
        script = (
            f"const found = [...document.querySelectorAll('{place} img, {place} canvas')];"
            "const size = (one) => [one.naturalWidth ?? one.width,"
            " one.naturalHeight ?? one.height];"
            "return found.every((one) => one.complete ?? true) && found.map(size);"
        )
        wait_until(lambda: bool(self.browser.execute_script(script)), f"pictures in {place}")
        found: list[list[int]] = self.browser.execute_script(script)
        return found


def test_a_file_is_shown_sent_and_shown_again(
    host: RunningHost, browser: webdriver.Chrome, image: Path
) -> None:
    page = FilePage(browser, host, "picture", image)
    page.wait_for("#try .pictures", rf"^{image.name}, {image.stat().st_size} bytes$")
    assert page.picture_sizes("#try") == [[20, 10]]
    page.press("Send")
    page.wait_for("#status", "^200 OK")
    assert page.picture_sizes("#outputs") == [[20, 10], [16, 8], [16, 8]]
    assert f"SIZES INT32 [1]\n[{image.stat().st_size}]" in page.text("#outputs")
    assert f"COPIES BYTES [1]\n[<{image.stat().st_size} bytes>]" in page.text("#outputs")
    row = "return [...arguments[0].getContext('2d').getImageData(0, 0, 16, 1).data]"
    for canvas in browser.find_elements(By.CSS_SELECTOR, "#outputs canvas"):
        assert browser.execute_script(row, canvas) == [255, 0, 0, 255] * 8 + [0, 0, 0, 255] * 8


def test_snippets_send_the_same_files(
    host: RunningHost, browser: webdriver.Chrome, image: Path
) -> None:
    other = image.with_name("-other.bin")
    other.write_bytes(b"\xff\x00")
    page = FilePage(browser, host, "picture", image, other)
    command = page.wait_for("#curl", "other.bin")
    python = page.wait_for("#python", "other.bin")
    for program in (["sh", "-c", command], [sys.executable, "-c", python]):
        done = subprocess.run(
            program, cwd=image.parent, capture_output=True, timeout=DEADLINE, check=True
        )
        assert re.search(rf"\[{image.stat().st_size},?\s*2\]".encode(), done.stdout), done


def test_files_can_be_removed_again(
    host: RunningHost, browser: webdriver.Chrome, image: Path
) -> None:
    page = FilePage(browser, host, "picture", image)
    page.wait_for("#curl", "cat")
    page.press("Remove files")
    page.wait_for("#curl", '"data":')
    page.press("Send")
    page.wait_for("#status", "^200 OK")
    assert 'COPIES BYTES [1]\n["text"]' in page.text("#outputs")


def test_a_decoupled_model_gets_the_text_of_a_file(
    host: RunningHost, browser: webdriver.Chrome, tmp_path: Path, image: Path
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("über\n<b>two</b>")
    page = FilePage(browser, host, "lines", text)
    page.wait_for("#curl", "über")
    page.press("Send")
    page.wait_for("#status", "· 2 responses$")
    assert "<b>two</b>" in page.text("#outputs")
    page = FilePage(browser, host, "lines", image)
    page.wait_for("#try .bad", "^This file is not UTF-8 text")
