"""Loading and unloading models of the server, and asking whether one is ready."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pb_utils import _arguments, _runtime
from pb_utils._model_exception import TritonModelException

if TYPE_CHECKING:
    Text = str | bytes | bytearray

_PREFIX = "file:"


@_arguments.with_argument_errors
def load_model(model_name: Text, config: Text = "", files: dict[str, bytes] | None = None) -> None:
    """Load a model, or load it again, and wait for it.

    Args:
        model_name: the model.
        config: its configuration as JSON text; the stored one if empty.
        files: contents by ``file:<path below the model's folder>``, instead of the stored files.
            Needs ``config``.

    Raises:
        TypeError: an argument has another type.
        TritonModelException: ``files`` is no dict, or the model cannot be loaded. What was loaded
            before serves on.
    """
    name = _arguments.check_text("load_model", "model_name", model_name)
    text = _arguments.check_text("load_model", "config", config)
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file "
            "contents"
        )
    contents = {_path(name, key): _content(value) for key, value in (files or {}).items()}
    try:
        _runtime.current().load_model(name, text, contents)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to load model: {error}") from None


@_arguments.with_argument_errors
def unload_model(model_name: Text, unload_dependents: bool = False) -> None:
    """Begin to unload a model: it is not ready any more, and ends its requests first.

    Args:
        model_name: the model.
        unload_dependents: whether the models that an ensemble is made of are unloaded with it.

    Raises:
        TypeError: an argument has another type.
        TritonModelException: it cannot be unloaded.
    """
    name = _arguments.check_text("unload_model", "model_name", model_name)
    dependents = _arguments.check_boolean("unload_model", "unload_dependents", unload_dependents)
    try:
        _runtime.current().unload_model(name, dependents)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to unload model: {error}") from None


@_arguments.with_argument_errors
def is_model_ready(model_name: Text, model_version: Text = "") -> bool:
    """Return whether a model takes requests.

    Args:
        model_name: the model.
        model_version: its version, as text; any if empty.

    Raises:
        TypeError: an argument has another type; a version is no number here.
        TritonModelException: there is no such model or version.
    """
    name = _arguments.check_text("is_model_ready", "model_name", model_name)
    version = _arguments.check_text("is_model_ready", "model_version", model_version)
    try:
        return _runtime.current().is_model_ready(name, version)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to check model readiness: {error}") from None


def _path(name: str, key: object) -> str:
    text = _arguments.check_text("load_model", "files", key)
    if not text.startswith(_PREFIX):
        raise TritonModelException(
            f"Failed to load model: the files of model '{name}' must have names of the form "
            f"'{_PREFIX}<path below the model's folder>', got '{text}'"
        )
    return text[len(_PREFIX) :]


def _content(value: object) -> bytes:
    if isinstance(value, str):
        return value.encode("utf-8")
    if isinstance(value, (bytes, bytearray, memoryview)):
        return bytes(value)
    raise _arguments.type_error("load_model", "files", "a dict of str to bytes", value)
