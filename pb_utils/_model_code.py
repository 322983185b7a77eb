"""The code of a model: imports its file, calls its methods, and checks what ``execute`` returns."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import os
import sys
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Dict, Iterable, List, Optional, Sequence

from pb_utils._datatypes import NAMES
from pb_utils._request import TRITONSERVER_REQUEST_RELEASE_RESCHEDULE
from pb_utils._response import MORE_THAN_ONE, InferenceResponse, Responder

if TYPE_CHECKING:
    from pb_utils._request import InferenceRequest
    from pb_utils._tensor import Tensor


def import_version(directory: str, version: str, file: str) -> types.ModuleType:
    """Imports ``<directory>/<version>/<file>`` as ``<version>.<stem>``.

    So relative imports of siblings work.

    Raises:
        Exception: any exception of the module.
    """
    package = types.ModuleType(version)
    # Not found on sys.path: the working directory comes first there.
    package.__path__ = [os.path.join(directory, version)]
    sys.modules[version] = package
    stem = file[: -len(".py")].replace("/", ".")
    return importlib.import_module(f"{version}.{stem}")


def import_file(path: str) -> types.ModuleType:
    """Imports exactly this file as ``<stem>``, even if ``sys.path`` has another of that name.

    Raises:
        Exception: any exception of the module.
    """
    name = os.path.basename(path)[: -len(".py")]
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None  # it is a .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def defines(model: object, method: str) -> bool:
    """Whether a model has a method, by its class or by its ``__getattr__``.

    If a property of the class raises another error than AttributeError, the model has it: the
    error tells the caller of the method what is wrong.
    """
    try:
        return hasattr(model, method)
    except Exception:  # `__getattr__` may raise anything for a name it does not know, as in Triton
        return any(method in vars(part) for part in type(model).__mro__)


ARGUMENTS = ("model_config", "model_repository", "model_version", "model_name")
"""The keys of the argument of ``preload``: those of ``initialize`` that concern all instances."""


def defines_preload(model_class: type[Any]) -> bool:
    """Whether the class has a static method ``preload``; another method of that name is its own."""
    return isinstance(inspect.getattr_static(model_class, "preload", None), staticmethod)


def call_preload(model_class: type[Any], args: Mapping[str, str]) -> None:
    """Calls ``preload`` with its part of the arguments of ``initialize``, if there is one.

    Raises:
        Exception: any exception of the model.
    """
    if defines_preload(model_class):
        model_class.preload({name: args[name] for name in ARGUMENTS})


def find_mismatches(
    response: InferenceResponse, config: Mapping[str, Any], requested: Sequence[str] = ()
) -> List[str]:
    """Returns a sentence for each output that differs. A server passes such a response on.

    Args:
        response: a response that is not an error.
        config: the configuration of the model; a decoupled model may leave outputs out.
        requested: names of the requested outputs; all outputs if empty.
    """
    declared: Dict[str, Mapping[str, Any]] = {entry["name"]: entry for entry in config["output"]}
    tensors = {tensor.name(): tensor for tensor in response.output_tensors()}
    found: List[str] = []
    for name, entry in declared.items():
        shape = declared_shape(entry, config["max_batch_size"])
        expected = f"the configuration declares {entry['data_type']} {shape}"
        tensor = tensors.get(name)
        if tensor is None:
            if not _is_decoupled(config) and (not requested or name in requested):
                found.append(f"output '{name}' is missing; {expected}")
            continue
        given = "TYPE_" + NAMES[tensor.triton_dtype()].replace("BYTES", "STRING")
        sizes = tensor.shape()
        fits = len(sizes) == len(shape) and all(
            wanted in (-1, size) for wanted, size in zip(shape, sizes)
        )
        if given != entry["data_type"] or not fits:
            found.append(f"output '{name}' is {given} {list(sizes)}; {expected}")
    return found


def describe_undeclared(
    model: str, outputs: Iterable[Tensor], declared: Sequence[str]
) -> Optional[str]:
    """Returns a sentence about the outputs that are not declared; None if there are none.

    Args:
        model: name of the model.
        outputs: the outputs of a response.
        declared: names of the outputs of its configuration.
    """
    names = [tensor._name for tensor in outputs if tensor._name not in declared]
    if not names:
        return None
    return (
        f"model '{model}' returned an output {_quote(names)}, which its configuration does not"
        f" have; the configuration has: {_quote(declared)}"
    )


def _quote(names: Iterable[str]) -> str:
    return ", ".join(f"'{name}'" for name in names) or "no output"


def declared_shape(entry: Mapping[str, Any], max_batch_size: int) -> List[int]:
    """Returns the shape of a tensor for the model, with the batch dimension; -1 is any size."""
    reshape = entry.get("reshape")
    dims = entry["dims"] if reshape is None else reshape.get("shape", ())
    return [-1, *dims] if max_batch_size > 0 else list(dims)


def _is_decoupled(config: Mapping[str, Any]) -> bool:
    return bool(config.get("model_transaction_policy", {}).get("decoupled"))


class InvalidReturnValue(Exception):
    """A batch cannot be answered by what the model did; the text is what a server sends."""


def call_execute(model: Any, path: object, requests: Sequence[InferenceRequest]) -> Any:
    """Calls ``execute`` of a model, whose file is ``path``.

    Raises:
        InvalidReturnValue: the model has no such method.
        Exception: any exception of the model.
    """
    if not defines(model, "execute"):
        raise InvalidReturnValue(f"Python model {path} does not implement `execute` method.")
    return model.execute(requests)


def check_return_value(
    instance: str,
    decoupled: bool,
    requests: Sequence[InferenceRequest],
    responders: Sequence[Responder],
    returned: Any,
) -> None:
    """Checks a value that is not None.

    Args:
        instance: name of the model instance.
        decoupled: whether the model is decoupled.
        requests: the requests of the batch, in the list that the model got.
        responders: their responders.
        returned: the value.

    Raises:
        InvalidReturnValue: the value is not a list with one response, or None, for each request.
    """
    if decoupled:
        raise InvalidReturnValue(
            f"Python model '{instance}' is using the decoupled mode and the execute function must "
            "return None."
        )
    if not isinstance(returned, list):
        raise InvalidReturnValue(
            f"Expected a list in the execute return, found type '{type(returned)}'."
        )
    if len(returned) != len(responders):
        raise InvalidReturnValue(
            "Number of InferenceResponse objects do not match the number of InferenceRequest "
            f"objects. InferenceRequest(s) size is:{len(responders)}, and InferenceResponse(s) "
            f"size is:{len(returned)}\n"
        )
    for request, responder, response in zip(requests, responders, returned):
        if response is None:
            continue
        if request._release_flags == TRITONSERVER_REQUEST_RELEASE_RESCHEDULE:
            raise InvalidReturnValue(
                "Expected a None object in the execute function return list for reschduled "
                f"request, found type '{type(response)}'."
            )
        if not isinstance(response, InferenceResponse):
            raise InvalidReturnValue(
                "Expected an 'InferenceResponse' object in the execute function return list, "
                f"found type '{type(response)}'."
            )
        if responder.has_response:
            raise InvalidReturnValue(MORE_THAN_ONE)
