"""Loads a PyTorch file of any of its formats as a callable program."""

import os
import warnings
import zipfile
from typing import Any, Callable, List, NamedTuple, Optional, Sequence

import torch

from stub.backends.contract import ModelTensor
from stub.backends.pytorch.arguments import Argument
from stub.user_model import ModelFailure

_NAMES = {
    torch.bool: "TYPE_BOOL",
    torch.uint8: "TYPE_UINT8",
    torch.int8: "TYPE_INT8",
    torch.int16: "TYPE_INT16",
    torch.int32: "TYPE_INT32",
    torch.int64: "TYPE_INT64",
    torch.float16: "TYPE_FP16",
    torch.float32: "TYPE_FP32",
    torch.float64: "TYPE_FP64",
    torch.bfloat16: "TYPE_BF16",
}
DATA_TYPES = (*_NAMES.values(), "TYPE_STRING")
"""The data types of a configuration that PyTorch supports."""

_KINDS = {"Tensor": "tensor", "Optional[Tensor]": "tensor", "List[str]": "texts"}
_KINDS["Dict[str, Tensor]"] = "dict"


class Program(NamedTuple):
    """The content of a file.

    `arguments` is None if the file does not describe them. `modifies_inputs`: whether a run may
    write to its inputs, as in-place operations do. `inputs` and `outputs` are the file's
    description of shapes and types, or None.
    """

    call: Callable[..., Any]
    arguments: Optional[List[Argument]]
    modifies_inputs: bool
    inputs: Optional[List[ModelTensor]] = None
    outputs: Optional[List[ModelTensor]] = None


def load(model: str, path: str, device: str) -> Program:
    """Loads the file; the weights go to `device`, or to where they were saved if it is "".

    Raises ModelFailure.
    """
    if not os.path.isfile(path):
        raise ModelFailure(f"unable to find '{path}' for model '{model}'")
    try:
        return _reader_for(path)(path, device)
    except Exception as error:  # the library raises many types for an unusable file
        text = str(error).strip() or type(error).__name__
        raise ModelFailure(
            f"model '{model}' cannot be loaded: torch {torch.__version__} cannot use '{path}':"
            f" {text}"
        ) from error


def _reader_for(path: str) -> Callable[[str, str], Program]:
    """Returns the reader for the file's format, which its content tells and its name does not."""
    if not zipfile.is_zipfile(path):
        raise ValueError("it is not a PyTorch archive, or it is damaged")
    with zipfile.ZipFile(path) as archive:
        names = ["/" + name.partition("/")[2] for name in archive.namelist()]
        bare = ["/" + name for name in archive.namelist()]
    if any(name.startswith("/data/aotinductor/") for name in (*names, *bare)):
        return _read_compiled
    if "/archive_format" in names or "/serialized_exported_program.json" in bare:
        return _read_exported
    if "/constants.pkl" in names:
        return _read_script
    raise ValueError(
        "it holds pickled Python objects, such as weights, and no program; save the model by"
        " torch.export.save or torch.jit.save"
    )


def _read_script(path: str, device: str) -> Program:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # only the author can act on it
        module = torch.jit.load(path, map_location=device or None)
    arguments = [
        Argument(
            each.name,
            _KINDS.get(str(each.type), "other"),
            each.has_default_value(),
            each.default_value,
        )
        for each in module.forward.schema.arguments[1:]
    ]
    graph = module.inlined_graph
    aliases = graph.alias_db()
    modifies_inputs = any(aliases.has_writers(value) for value in graph.inputs())
    return Program(module, arguments, modifies_inputs)


def _read_exported(path: str, device: str) -> Program:
    exported = torch.export.load(path)
    signature, result = exported.graph_signature, exported.call_spec.out_spec
    inputs = _describe_tensors(exported, signature.user_inputs)
    whole = exported.module_call_graph[0].signature
    # The nodes of the graph have these names in lower case.
    argument_names = whole and whole.forward_arg_names
    if inputs is not None and argument_names and len(argument_names) == len(inputs):
        inputs = [each._replace(name=name) for each, name in zip(inputs, argument_names)]
    outputs = _describe_tensors(exported, signature.user_outputs)
    if outputs is not None:
        by_name = result is not None and result.type is dict
        names = list(result.context) if by_name else [f"OUTPUT__{n}" for n in range(len(outputs))]
        outputs = [each._replace(name=name) for each, name in zip(outputs, names)]
    module = exported.module()
    if device:
        module = module.to(device)
    modifies_inputs = _modifies_tensors(exported)
    example: Any = exported.example_inputs or ((), {})
    args, kwargs = example
    if len(args) == 1 and not kwargs and isinstance(args[0], dict):
        if inputs is not None:
            inputs = [each._replace(name=name) for each, name in zip(inputs, args[0])]
        return Program(module, [Argument("inputs", "dict")], modifies_inputs, inputs, outputs)
    arguments = None if inputs is None else [Argument(each.name) for each in inputs]

    def call(*values: Any) -> Any:
        named = dict(zip(kwargs, values[len(args) :]))
        return module(*values[: len(values) - len(named)], **named)

    return Program(call, arguments, modifies_inputs, inputs, outputs)


def _read_compiled(path: str, device: str) -> Program:
    # The import takes seconds, and only this format needs it.
    from torch._inductor import aoti_load_package

    index = torch.device(device).index if device.startswith("cuda") else None
    call = aoti_load_package(path, device_index=-1 if index is None else index)
    return Program(call, None, True)


def _modifies_tensors(exported: Any) -> bool:
    for node in exported.graph.nodes:
        if node.op == "call_function":
            schema = getattr(node.target, "_schema", None)
            if schema is None or schema.is_mutable:
                return True
    return False


def _describe_tensors(exported: Any, names: Sequence[Any]) -> Optional[List[ModelTensor]]:
    """Returns the description of these tensors; None if one of them is not a tensor."""
    nodes = {node.name: node for node in exported.graph.nodes}
    found: List[ModelTensor] = []
    for name in names:
        value = nodes[name].meta.get("val") if name in nodes else None
        if not isinstance(value, torch.Tensor) or value.dtype not in _NAMES:
            return None
        shape = [size if isinstance(size, int) else -1 for size in value.shape]
        found.append(ModelTensor(name, _NAMES[value.dtype], shape))
    return found
