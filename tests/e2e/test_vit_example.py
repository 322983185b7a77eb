"""The example of a vision transformer, by the commands of its README: make test-backends."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest

from tests.conftest import Serve
from tests.readmes import walkthroughs, write

MISSING = [
    name
    for name in ("transformers", "torch", "onnx", "onnxruntime", "PIL")
    if importlib.util.find_spec(name) is None
]


@pytest.mark.skipif(
    "PBHOST_TEST_HEAVY" not in os.environ or bool(MISSING),
    reason="importing transformers twice takes half a minute: make test-backends",
)
def test_both_forms_of_a_transformer_agree(serve: Serve, tmp_path: Path) -> None:
    (example,) = walkthroughs("vit")
    write([example], tmp_path)
    assert example.answer(serve(tmp_path).wait_started()) == example.expected
