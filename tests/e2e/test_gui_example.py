"""The page of examples/gui, in front of the pipeline that it asks."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest

from tests.conftest import DEADLINE, ROOT, Serve
from tests.readmes import run

CLIENTS = ROOT / ".venv-openai-clients" / "bin"
_URL = re.compile(r"http://127\.0\.0\.1:[0-9]+")
GUI = ROOT / "examples" / "gui"


@pytest.mark.skipif(not (CLIENTS / "python").exists(), reason="make openai-clients")
def test_the_page_reads_the_digits_of_an_image(serve: Serve, tmp_path: Path) -> None:
    text = (GUI / "README.md").read_text()
    start = "python examples/gui/app.py --url localhost:8000"
    draw = "python examples/digits.py --save digits.png 31415"
    assert f"\n{start}\n" in text and f"\n{draw}\n" in text
    image = str(tmp_path / "digits.png")
    run(draw.replace("digits.png", image))
    host = serve(ROOT / "model_repository", "--cache-config=local,size=1048576").wait_started()
    program = start.replace("localhost:8000", host.http_url).split()[1:]
    command: list[str | Path] = [CLIENTS / "python", "-u", *program]
    page = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True)
    try:
        assert page.stdout is not None
        url = next(found[0] for line in page.stdout if (found := _URL.search(line)))
        asked = [CLIENTS / "python", ROOT / "tests" / "openai_clients" / "gui_client.py"]
        done = subprocess.run(
            [*asked, url, image], capture_output=True, text=True, timeout=DEADLINE, check=False
        )
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout) == {
            "digits": "31415",
            "has_boxes": True,
            "error": "Choose an image first.",
        }
    finally:
        page.terminate()
        page.communicate(timeout=DEADLINE)
