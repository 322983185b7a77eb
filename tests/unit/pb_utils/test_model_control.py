"""Functions that load and unload models and query their readiness."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from pb_utils import TritonModelException, is_model_ready, load_model, unload_model
from tests.unit.pb_utils.recording import RecordingRuntime


def test_arguments_reach_the_server(runtime: RecordingRuntime) -> None:
    load_model("m")
    files: dict[str, Any] = {"file:1/model.py": b"code", "file:x": bytearray()}
    load_model(b"m", '{"backend": "python"}', files)
    load_model(model_name="m", config=b"{}", files={})
    load_model("m", hold=True)
    unload_model("m")
    unload_model(model_name=b"m", unload_dependents=np.bool_(True))  # type: ignore[arg-type]  # allowed, but not in the types
    assert is_model_ready("m") is True
    runtime.ready = False
    assert is_model_ready(model_name="m", model_version=b"3") is False
    assert runtime.calls == [
        ("load", "m", "", {}),
        ("load", "m", '{"backend": "python"}', {"1/model.py": b"code", "x": b""}),
        ("load", "m", "{}", {}),
        ("load", "m", "", {}, "held"),
        ("unload", "m", False),
        ("unload", "m", True),
        ("ready?", "m", ""),
        ("ready?", "m", "3"),
    ]


@pytest.mark.parametrize(
    ("call", "prefix"),
    [
        (load_model, "Failed to load model: "),
        (unload_model, "Failed to unload model: "),
        (is_model_ready, "Failed to check model readiness: "),
    ],
)
def test_rejections_by_the_server_are_raised(
    runtime: RecordingRuntime, call: Callable[[str], object], prefix: str
) -> None:
    runtime.refuses = "no"
    with pytest.raises(TritonModelException) as caught:
        call("m")
    assert str(caught.value) == f"{prefix}no"


@pytest.mark.parametrize("files", [["file:a"], "file:a", 1, ("file:a", b"")])
def test_files_must_be_a_dict(runtime: RecordingRuntime, files: Any) -> None:
    with pytest.raises(TritonModelException) as caught:
        load_model("m", "{}", files)
    assert str(caught.value) == (
        "failed to load model 'm', files should be a dictionary of file paths and file contents"
    )
    assert runtime.calls == []


def test_file_names_must_start_with_file_prefix(runtime: RecordingRuntime) -> None:
    with pytest.raises(TritonModelException) as caught:
        load_model("m", "{}", {"1/model.py": b""})
    assert str(caught.value) == (
        "Failed to load model: the files of model 'm' must have names of the form 'file:<path "
        "below the model's folder>', got '1/model.py'"
    )
    assert runtime.calls == []


@pytest.mark.parametrize(
    ("call", "arguments"),
    [
        (load_model, (None,)),
        (load_model, ("m", None)),
        (load_model, ("m", {"backend": "python"})),
        (load_model, ("m", "{}", {"file:a": 5})),
        (load_model, ("m", "{}", {5: b""})),
        (load_model, ()),
        (unload_model, (5,)),
        (unload_model, ("m", "yes")),
        (unload_model, ("m", None)),
        (is_model_ready, (None,)),
        (is_model_ready, ("m", 1)),
        (is_model_ready, ("m", None)),
    ],
)
def test_wrong_arguments_are_type_errors(
    runtime: RecordingRuntime, call: Callable[..., object], arguments: tuple[Any, ...]
) -> None:
    expected = rf"^{call.__name__}\(\): incompatible function arguments\."
    with pytest.raises(TypeError, match=expected):
        call(*arguments)
    assert runtime.calls == []
