"""Loads a PyTorch file of any of its formats as a callable program, with arrays in and out."""

import os
import re
import warnings
import zipfile
from contextlib import ExitStack
from typing import Any, Callable, Dict, List, Mapping, NamedTuple, Optional, Sequence

import numpy as np
import torch

import pb_utils
from pb_utils._storage import address_of, array_at
from stub.backends.batch import Array
from stub.backends.model_contract import ConfiguredTensor, ModelTensor, format_shape
from stub.backends.model_settings import Placement, Settings
from stub.user_model import ModelFailure

_INDEXED = re.compile(r".+__(\d+)")


class Argument(NamedTuple):
    """One argument of `forward`. `kind` is tensor, texts, dict (of tensors) or other."""

    name: str
    kind: str = "tensor"
    optional: bool = False
    default: Any = None


class ArgumentMapping:
    """The mapping from named inputs to the arguments of a call.

    `order` has the name of the input at each position, or None for the default value. With
    `as_dict`, the only argument is a dict of all inputs.
    """

    def __init__(
        self, order: Sequence[Optional[str]], arguments: Sequence[Argument], as_dict: bool = False
    ) -> None:
        self.order = list(order)
        self.as_dict = as_dict
        self._arguments = arguments

    def positional_arguments(self, inputs: Mapping[str, Any]) -> List[Any]:
        """Returns the positional arguments; omitted inputs get the default value."""
        if self.as_dict:
            return [dict(inputs)]
        values: List[Any] = []
        for position, name in enumerate(self.order):
            if name is not None and name in inputs:
                values.append(inputs[name])
            else:
                values.append(self._arguments[position].default)
        return values

    def argument_of(self, name: str) -> Argument:
        """Returns the argument to which an input is mapped."""
        if self.as_dict or not self._arguments:
            return Argument(name)
        return self._arguments[self.order.index(name)]


def map_inputs_to_arguments(
    model: str, names: Sequence[str], arguments: Optional[Sequence[Argument]]
) -> ArgumentMapping:
    """Maps inputs to positions: by `__<index>`, by the argument's name, else by their order.

    `arguments` is None if the file does not describe them. Raises ModelFailure.
    """
    if arguments is None:
        indices = _indices(names)
        order = names if indices is None else _order_by_index(model, "input", names, indices, None)
        return ArgumentMapping(order, ())
    if len(arguments) == 1 and arguments[0].kind == "dict":
        return ArgumentMapping([], arguments, as_dict=True)
    order = _positions(model, names, arguments)
    for argument, name in zip(arguments, order):
        if name is None and not argument.optional:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration has no input for the"
                f" argument '{argument.name}' of forward({_signature(arguments)}); name inputs"
                " like the arguments, or <name>__<index>, or list them in the same order"
            )
        if name is not None and argument.kind in ("dict", "other"):
            raise ModelFailure(
                f"model '{model}' cannot be loaded: the argument '{argument.name}' of"
                f" forward({_signature(arguments)}) is not a tensor, so it cannot be the"
                f" input '{name}'"
            )
    return ArgumentMapping(order, arguments)


def _positions(
    model: str, names: Sequence[str], arguments: Sequence[Argument]
) -> List[Optional[str]]:
    indices = _indices(names)
    if indices is not None:
        return _order_by_index(model, "input", names, indices, len(arguments))
    known = [argument.name for argument in arguments]
    if all(name in known for name in names):
        return [name if name in names else None for name in known]
    if len(names) > len(arguments):
        raise ModelFailure(
            f"unable to load model '{model}', configuration expects {len(names)} inputs, model"
            f" provides {len(arguments)}: forward({_signature(arguments)})"
        )
    return [*names, *[None] * (len(arguments) - len(names))]


def map_outputs_to_results(model: str, names: Sequence[str]) -> Dict[str, int]:
    """Returns the position of each output among the results: by `__<index>`, else by their order.

    Raises ModelFailure.
    """
    indices = _indices(names)
    if indices is None:
        return {name: index for index, name in enumerate(names)}
    _order_by_index(model, "output", names, indices, None)
    return dict(zip(names, indices))


def _indices(names: Sequence[str]) -> Optional[List[int]]:
    """Returns the indices of the names; None unless all names have one."""
    found = [_INDEXED.fullmatch(name) for name in names]
    if not found or not all(found):
        return None
    return [int(match[1]) for match in found if match]


def _order_by_index(
    model: str, kind: str, names: Sequence[str], indices: Sequence[int], count: Optional[int]
) -> List[Optional[str]]:
    # Outputs may be omitted, and so may arguments that the file does not describe.
    order: List[Optional[str]] = [None] * (max(indices) + 1 if count is None else count)
    for name, index in zip(names, indices):
        if index >= len(order):
            raise ModelFailure(
                f"model '{model}' cannot be loaded: the index of its {kind} '{name}' is too large,"
                f" forward takes {len(order)} arguments"
            )
        if order[index] is not None:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its {kind}s '{order[index]}' and '{name}' have"
                " the same index"
            )
        order[index] = name
    if kind == "input" and count is None and None in order:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: no input has the index {order.index(None)}"
        )
    return order


def _signature(arguments: Sequence[Argument]) -> str:
    return ", ".join(argument.name for argument in arguments)


_IGNORED_PARAMETERS = (
    "ENABLE_WEIGHT_SHARING",  # instances are processes, each with its own memory
    "ENABLE_NVFUSER",  # PyTorch no longer has it
)


class RunContext:
    """The context manager around calls of the program; it can be entered repeatedly.

    Threads and the TorchScript compiler are set for the whole process, which has only one model.
    Raises ModelFailure for an invalid parameter.
    """

    def __init__(self, settings: Settings, placement: Placement) -> None:
        self._inference = settings.get_bool("INFERENCE_MODE", True)
        self._optimized = not settings.get_bool("DISABLE_OPTIMIZED_EXECUTION", False)
        self._clean = placement.on_gpu and settings.get_bool("ENABLE_CACHE_CLEANING", False)
        if not settings.get_bool("ENABLE_JIT_EXECUTOR", True):
            torch._C._jit_set_profiling_executor(False)
        if not settings.get_bool("ENABLE_JIT_PROFILING", True):
            torch._C._jit_set_profiling_mode(False)
        if "ENABLE_TENSOR_FUSER" in settings.values:
            torch._C._jit_set_texpr_fuser_enabled(settings.get_bool("ENABLE_TENSOR_FUSER", True))
        if not settings.get_bool("ENABLE_CUDNN", True) or settings.get_bool("DISABLE_CUDNN", False):
            torch.backends.cudnn.enabled = False
        threads = settings.get_int("INTRA_OP_THREAD_COUNT", 0)
        if threads:
            torch.set_num_threads(threads)
        threads = settings.get_int("INTER_OP_THREAD_COUNT", 0)
        if threads:
            torch.set_num_interop_threads(threads)
        for name in _IGNORED_PARAMETERS:
            if settings.get_bool(name, False):
                pb_utils.Logger.log_warn(f"parameter '{name}' has no effect")
        self._stack = ExitStack()  # for the current call

    def __enter__(self) -> None:
        if self._inference:
            self._stack.enter_context(torch.inference_mode())
        if not self._optimized:
            self._stack.enter_context(torch.jit.optimized_execution(False))

    def __exit__(self, *exception: Any) -> None:
        self._stack.close()
        if self._clean:
            torch.cuda.empty_cache()


def to_tensor(array: Array, data_type: str, modifies_inputs: bool, device: str) -> Any:
    """Returns a tensor over the array's memory, or over a copy if it must be writable or moved."""
    if not array.flags.writeable:
        # PyTorch has no read-only tensors. A program that does not write can use shared memory.
        address = address_of(array)
        shared = array_at(address, array.dtype, array.shape, array, writable=True)
        array = array.copy() if modifies_inputs else shared
    if data_type == "TYPE_BF16":
        tensor = torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    else:
        tensor = torch.from_numpy(array)
    return tensor.to(device) if device else tensor


def to_array(value: Any, expected: ConfiguredTensor, model: str) -> Array:
    """Returns one result as an array. Raises TritonModelException if it has another type."""
    if isinstance(value, torch.Tensor) and expected.data_type != "TYPE_STRING":
        tensor = value.detach().cpu().contiguous().resolve_conj().resolve_neg()
        if tensor.dtype == torch.bfloat16:
            # numpy has no BF16, so the array holds the bits in 16-bit integers.
            bits: Array = tensor.view(torch.int16).numpy().view(np.uint16)
            if expected.data_type == "TYPE_BF16":
                return bits
            raise _wrong_result_error(model, expected, "TYPE_BF16")
        return tensor.numpy()
    texts = [value] if isinstance(value, str) else value
    if expected.data_type == "TYPE_STRING" and _are_texts(texts):
        array = np.array(texts, dtype=np.object_)
        rest = [1 if size == -1 else size for size in expected.shape[1:]]
        if len(rest) and len(texts) % int(np.prod(rest)) == 0:
            return array.reshape([-1, *rest])
        return array
    raise _wrong_result_error(model, expected, type(value).__name__)


def _are_texts(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(isinstance(text, str) for text in value)


def results_by_name(value: Any, names: Mapping[str, int], model: str) -> Mapping[str, Any]:
    """Returns the results of `forward` by the outputs' names. Raises TritonModelException."""
    if isinstance(value, dict):
        missing = [name for name in names if name not in value]
        if missing:
            raise pb_utils.TritonModelException(
                f"model '{model}' returned a dict without the output '{missing[0]}', its keys are:"
                f" {', '.join(map(str, value))}"
            )
        return value
    single = not isinstance(value, (list, tuple)) or (value and _are_texts(value))
    results = [value] if single else value
    for name, index in names.items():
        if index >= len(results):
            raise pb_utils.TritonModelException(
                f"model '{model}' returned {len(results)} results, and the output '{name}' is"
                f" number {index} of them, counted from 0"
            )
    return {name: results[index] for name, index in names.items()}


def _wrong_result_error(
    model: str, expected: ConfiguredTensor, got: str
) -> pb_utils.TritonModelException:
    return pb_utils.TritonModelException(
        f"configuration expects datatype {expected.data_type} for output '{expected.name}' of"
        f" model '{model}' with shape {format_shape(expected.shape)}, model provides {got}"
    )


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
