"""Model control: functions that load and unload other models and query their readiness."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pb_utils import _arguments, _runtime
from pb_utils._exceptions import TritonModelException

if TYPE_CHECKING:
    Text = str | bytes | bytearray

_PREFIX = "file:"


@_arguments.with_argument_errors
def load_model(
    model_name: Text,
    config: Text = "",
    files: dict[str, bytes] | None = None,
    *,
    hold: bool = False,
) -> None:
    """Loads or reloads a model, and waits until it is loaded.

    A loaded version continues serving if the reload fails. The server must run with ``--model-
    control-mode=explicit`` (docs/reference/model-module.md, "Model control").

    Args:
        model_name: name of the model.
        config: model configuration as JSON text, instead of the stored one; the stored one if
            empty.
        files: contents of files instead of the stored files. A key is ``file:<path below the
            model's folder>``. Needs ``config``.
        hold: whether this instance holds the model: other models cannot unload it until this
            instance has called ``unload_model`` as often, or has ended. A model that was loaded
            with ``hold`` is unloaded when the last instance that holds it has ended. Triton does
            not have this argument.

    Raises:
        TypeError: an argument has the wrong type.
        TritonModelException: ``files`` is not a dict, or the model cannot be loaded.

    Examples:
        >>> pb_utils.load_model("square")
        >>> pb_utils.load_model("square", hold=True)
    """
    name = _arguments.check_text("load_model", "model_name", model_name)
    text = _arguments.check_text("load_model", "config", config)
    held = _arguments.check_boolean("load_model", "hold", hold)
    if files is not None and not isinstance(files, dict):
        raise TritonModelException(
            f"failed to load model '{name}', files should be a dictionary of file paths and file "
            "contents"
        )
    contents = {_path(name, key): _content(value) for key, value in (files or {}).items()}
    try:
        _runtime.current().load_model(name, text, contents, held)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to load model: {error}") from None


@_arguments.with_argument_errors
def unload_model(model_name: Text, unload_dependents: bool = False) -> None:
    """Starts to unload a model. When the call returns, the model is no longer ready.

    If this instance holds the model (``load_model``), the call releases one hold. While an instance
    holds the model, it stays loaded. The model completes its requests first. A model that is
    unknown or already unloaded is not an error (docs/reference/model-module.md, "Model control").

    Args:
        model_name: name of the model.
        unload_dependents: for an ensemble, whether to unload the models of its steps too.

    Raises:
        TypeError: an argument has the wrong type.
        TritonModelException: the server rejects the call.
    """
    name = _arguments.check_text("unload_model", "model_name", model_name)
    dependents = _arguments.check_boolean("unload_model", "unload_dependents", unload_dependents)
    try:
        _runtime.current().unload_model(name, dependents)
    except TritonModelException as error:
        raise TritonModelException(f"Failed to unload model: {error}") from None


@_arguments.with_argument_errors
def is_model_ready(model_name: Text, model_version: Text = "") -> bool:
    """Returns whether a model is ready for requests.

    The rules are in docs/reference/model-module.md, "Model control".

    Args:
        model_name: name of the model.
        model_version: version as text; any version if empty.

    Raises:
        TypeError: an argument has the wrong type; the version must be text, not a number.
        TritonModelException: the server has no such model or version.
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
