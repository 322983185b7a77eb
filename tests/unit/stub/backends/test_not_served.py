"""Frameworks that are known and not served yet."""

from __future__ import annotations

from pathlib import Path

import pytest

from pb_utils import testing
from stub.user_model import ModelFailure
from tests.conftest import ROOT

INSTEAD = {
    "tensorrt": (
        "serve the model that the plan was built from with the backend 'onnxruntime', on the GPU"
    ),
}


@pytest.mark.parametrize("backend", INSTEAD)
@pytest.mark.parametrize("inputs", [[], [{"name": "x", "data_type": "TYPE_FP32", "dims": [1]}]])
def test_the_load_fails_and_says_what_to_do_instead(
    tmp_path: Path, backend: str, inputs: list[dict[str, object]]
) -> None:
    (tmp_path / "m" / "1").mkdir(parents=True)
    config = {"name": "m", "backend": backend, "input": inputs}
    with pytest.raises(ModelFailure) as caught:
        testing.load(tmp_path / "m", config, backend=ROOT / "stub" / "backends" / backend)
    assert str(caught.value) == (
        f"model 'm' cannot be loaded: the backend '{backend}' is not served yet; {INSTEAD[backend]}"
    )
