"""Finds, imports and calls the user's `TritonPythonModel`, and describes its exceptions."""

import json
import operator
import os
import sys
import types
from typing import Any, Dict, List, Optional

import pb_utils
from pb_utils import _model_texts as texts
from pb_utils._exceptions import missing_attribute
from pb_utils._model_code import call_preload, defines, import_file, import_version
from stub.imports import isolate_modules
from stub.wire.messages import ModelSource


class ModelFailure(Exception):
    """The model cannot be used; the text is the error that the user sees."""


_FRAMES_HEADING = "\n\nAt:\n"
_HERE = os.path.dirname(os.path.abspath(__file__))
_INTERNAL_PATHS = (
    _HERE + os.sep,
    os.path.dirname(os.path.abspath(pb_utils.__file__)) + os.sep,
    os.path.join(os.path.dirname(_HERE), "host", "bind") + os.sep,  # around bound functions
)
_TENSOR_METHODS = ("as_numpy", "triton_dtype", "is_cpu", "to_dlpack")  # of no other class
_UNKNOWN = object()
_FUTURES = os.path.join("concurrent", "futures", "_base.py")


def _notes_of(error: BaseException) -> List[object]:
    try:
        notes = getattr(error, "__notes__", None)
        return list(notes) if isinstance(notes, (list, tuple)) else []
    except Exception:  # the user's property or list may raise anything
        return []


def _note_text(note: object) -> str:
    try:
        return str(note)
    except Exception as broken:  # the user's `__str__` may raise anything
        return f"<NOTE UNAVAILABLE DUE TO {type(broken).__name__}>"


def _suggestion(error: AttributeError) -> str:
    """Returns the name that was probably meant, for an instance of a class of the API."""
    obj = getattr(error, "obj", _UNKNOWN)  # from Python 3.10 on
    if obj is None and getattr(error, "name", "") in _TENSOR_METHODS:
        return "; if it is from get_input_tensor_by_name, the request has no such input"
    if type(obj).__module__ != "c_python_backend_utils":
        return ""
    return missing_attribute(obj, getattr(error, "name", ""))


def _path_advice(error: OSError) -> str:
    """Returns where a file lies that was opened by a relative path: beside code of the model."""
    name, trace = error.filename, error.__traceback__
    if not isinstance(name, str) or not name or os.path.isabs(name):
        return ""
    while trace is not None:
        folder = os.path.dirname(trace.tb_frame.f_code.co_filename)
        if os.path.isabs(folder) and os.path.exists(os.path.join(folder, name)):
            return (
                f"; it lies in {folder}, but a relative path starts at the working directory of"
                f" the server: use Path(__file__).parent / {name!r}"
            )
        trace = trace.tb_next
    return ""


def describe_exception(error: BaseException, of_message: bool = False) -> str:
    """Returns an exception as one text: type, message, then frames with the innermost first.

    The form is that of docs/reference/model-methods.md, "Exceptions". Frames of this project and
    those that wait for a coroutine are left out: they do not help a model author. `of_message` says
    that the error was raised by the `__str__` of another one.
    """
    reason = ""
    try:
        message = str(error) or "<EMPTY MESSAGE>"
    except Exception as broken:  # as above
        message = "<MESSAGE UNAVAILABLE DUE TO ANOTHER EXCEPTION>"
        if not of_message:  # a `__str__` that raises an error of its own class would never end
            reason = "\nMESSAGE UNAVAILABLE DUE TO EXCEPTION: " + describe_exception(broken, True)
    if isinstance(error, AttributeError):
        message += _suggestion(error)
    elif isinstance(error, FileNotFoundError):
        message += _path_advice(error)
    notes = _notes_of(error)
    if notes:
        message += f"\n__notes__ (len={len(notes)}):\n" + "\n".join(map(_note_text, notes))
    message = texts.limit_text(message)
    lines: List[str] = []
    trace = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        waiting = not lines and code.co_filename.endswith(_FUTURES)
        if not (waiting or code.co_filename.startswith(_INTERNAL_PATHS)):
            lines.append(f"  {code.co_filename}({trace.tb_lineno}): {code.co_name}\n")
        trace = trace.tb_next
    if isinstance(error, SyntaxError) and error.filename:
        # No frame has the position of a syntax error.
        lines.append(f"  {error.filename}({error.lineno}): {(error.text or '').strip()}\n")
    text = f"{type(error).__name__}: {message}"
    if lines:
        text += _FRAMES_HEADING + "".join(reversed(lines))
    text += reason
    # Surrogates cannot be encoded in a message.
    return text.encode(errors="backslashreplace").decode()


class UserModel:
    """The class in `<directory>/<version>/<file>`, and later its one instance.

    The class of a Python-based backend is in `<backend>/<file>`.
    """

    def __init__(self, source: ModelSource, stub_name: str) -> None:
        """Imports the module. Raises ModelFailure."""
        self.version_directory = os.path.join(source.directory, str(source.version))
        self.path = os.path.join(source.backend or self.version_directory, source.file)
        self.instance: Any = None
        self._preloaded = False
        if not source.file.endswith(".py"):
            raise ModelFailure(texts.no_python_file(source.file))
        if not os.path.isfile(self.path):
            # The beginning is the documented text; the cause follows it.
            raise ModelFailure(
                f"Stub process '{stub_name}' is not healthy. Failed to preinitialize Python stub:"
                f" {texts.missing_file(self.path)}{_other_files(self.path)}"
            )
        try:
            module = self._import_backend(source) if source.backend else self._import(source)
        except BaseException as error:  # a module may raise anything, SystemExit too
            raise ModelFailure(_describe_import_error(error)) from error
        try:
            self._model_class: Any = module.TritonPythonModel
        except BaseException as error:  # as above: a module may have a `__getattr__`
            text = _describe_import_error(error)
            raise ModelFailure(text + _defined_classes(module)) from error
        if source.backend and hasattr(self._model_class, "backend_config"):
            self._model_class.backend_config = source.settings

    def _import(self, source: ModelSource) -> types.ModuleType:
        isolate_modules()
        _extend_sys_path(self.version_directory, source.directory)
        return import_version(source.directory, str(source.version), source.file)

    def _import_backend(self, source: ModelSource) -> types.ModuleType:
        if not self.path.startswith(_HERE + os.sep):  # backends of this project import its modules
            isolate_modules()
        _extend_sys_path(source.backend)
        return import_file(self.path)

    def auto_complete_config(self, config: str) -> Optional[str]:
        """Calls the model's `auto_complete_config`; returns None if it is not defined.

        Takes and returns a configuration as JSON. NumPy integers are written as numbers.

        Raises ModelFailure.
        """
        if not hasattr(self._model_class, "auto_complete_config"):
            return None
        given = pb_utils.ModelConfig(config)
        name = given.as_dict().get("name", "")
        try:
            completed = self._model_class.auto_complete_config(given)
        except ModelFailure:
            raise  # a backend of this project has already described the error
        except BaseException as error:  # SystemExit, too
            raise ModelFailure(describe_exception(error)) from error
        if not isinstance(completed, pb_utils.ModelConfig):
            raise ModelFailure(texts.no_model_config(name))
        try:
            return json.dumps(completed.as_dict(), default=operator.index)
        except (TypeError, ValueError) as error:
            raise ModelFailure(
                f"auto_complete_config function in model '{name}' returned a configuration that"
                f" is not JSON: {error}"
            ) from error

    def preload(self, args: Dict[str, str]) -> None:
        """Calls the static method `preload` of the model, if it has one, once.

        Raises ModelFailure.
        """
        if self._preloaded:
            return
        try:
            call_preload(self._model_class, args)
        except BaseException as error:  # SystemExit, too
            raise ModelFailure(f"preload failed: {describe_exception(error)}") from error
        self._preloaded = True

    def initialize(self, args: Dict[str, str]) -> None:
        """Constructs the model and calls its `initialize`, if it has one. Raises ModelFailure.

        Before that, calls `preload`, unless this process was forked from one that has done so.
        """
        self.preload(args)
        try:
            self.instance = self._model_class()
            if self.defines("initialize"):
                self.instance.initialize(dict(args))  # a copy, which the model may change
        except ModelFailure:
            raise
        except BaseException as error:  # SystemExit, too
            raise ModelFailure(describe_exception(error)) from error

    def defines(self, method: str) -> bool:
        """Whether the instance has a method."""
        return defines(self.instance, method)

    def finalize(self) -> Optional[str]:
        """Calls `finalize`, if the model has one; returns the text of an exception."""
        if self.instance is None or not self.defines("finalize"):
            return None
        try:
            self.instance.finalize()
        except BaseException as error:  # SystemExit, too: the caller logs it
            return describe_exception(error)
        return None


_PACKAGE_ROOT = os.path.dirname(os.path.dirname(os.path.abspath(pb_utils.__file__)))
"""The folder that holds `triton_python_backend_utils`."""


def _extend_sys_path(*directories: str) -> None:
    """Appends the directories, then ours, to `sys.path`: installed modules come first."""
    if sys.path[-1:] == [_PACKAGE_ROOT]:
        sys.path.pop()  # the entry point put it there
    sys.path.extend(folder for folder in (*directories, _PACKAGE_ROOT) if folder not in sys.path)


def _other_files(path: str) -> str:
    """Says which Python files lie where one is missing."""
    try:
        names = sorted(name for name in os.listdir(os.path.dirname(path)) if name.endswith(".py"))
    except OSError:
        return ""
    if not names:
        return ""
    found = ", ".join(f"'{name}'" for name in names[:3])
    return f"; there is {found}, which default_model_filename can name"


def _defined_classes(module: types.ModuleType) -> str:
    """Says which classes a module has instead of `TritonPythonModel`."""
    names = [
        f"'{name}'"
        for name, value in vars(module).items()
        if isinstance(value, type) and value.__module__ == module.__name__
    ]
    return f"; it defines {', '.join(names[:3])}" if names else ""


def _describe_import_error(error: BaseException) -> str:
    """Describes an exception without the frames of the import system."""
    lines = describe_exception(error).splitlines(keepends=True)
    text = "".join(line for line in lines if "importlib" not in line.split("(")[0])
    return text[: -len(_FRAMES_HEADING)] if text.endswith(_FRAMES_HEADING) else text
