"""Loads a TensorFlow saved model or frozen graph as a callable."""

import os
from typing import Any, Callable, List, Mapping, NamedTuple, Optional, Sequence

import tensorflow as tf

from stub.backends.batch import Array
from stub.backends.model_contract import ModelTensor
from stub.backends.model_settings import Placement, Settings
from stub.user_model import ModelFailure

_TYPES = {
    "bool": "TYPE_BOOL",
    "uint8": "TYPE_UINT8",
    "uint16": "TYPE_UINT16",
    "uint32": "TYPE_UINT32",
    "uint64": "TYPE_UINT64",
    "int8": "TYPE_INT8",
    "int16": "TYPE_INT16",
    "int32": "TYPE_INT32",
    "int64": "TYPE_INT64",
    "float16": "TYPE_FP16",
    "float32": "TYPE_FP32",
    "float64": "TYPE_FP64",
    "string": "TYPE_STRING",
}
_SERVE = "serve"
_DEFAULT_SIGNATURE = "serving_default"


class Graph(NamedTuple):
    """The content of a file; `call` takes inputs by name and returns outputs by name."""

    call: Callable[[Mapping[str, Array]], Mapping[str, Array]]
    inputs: List[ModelTensor]
    outputs: List[ModelTensor]
    kept_alive: Any


def configure_tensorflow(model: str, settings: Settings, placement: Placement) -> None:
    """Sets threads and devices of the process; must precede all other use of the library.

    Raises ModelFailure.
    """
    threading = tf.config.threading
    threading.set_intra_op_parallelism_threads(settings.get_int("TF_NUM_INTRA_THREADS", 0))
    threading.set_inter_op_parallelism_threads(settings.get_int("TF_NUM_INTER_THREADS", 0))
    gpus = tf.config.list_physical_devices("GPU")
    if placement.on_gpu and placement.device >= len(gpus):
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its instance '{placement.instance}' is to run on"
            f" GPU {placement.device}, and tensorflow {tf.__version__} sees {len(gpus)} GPUs;"
            " install tensorflow[and-cuda], or configure KIND_CPU"
        )
    if placement.kind != "MODEL":
        visible = [gpus[placement.device]] if placement.on_gpu else []
        tf.config.set_visible_devices(visible, "GPU")
        for gpu in visible:
            # Other processes use the GPU as well.
            tf.config.experimental.set_memory_growth(gpu, True)


def load_saved_model(model: str, path: str, settings: Settings) -> Graph:
    """Loads the signature of a saved model that the parameters name. Raises ModelFailure."""
    if not os.path.isdir(path):
        raise ModelFailure(f"unable to find '{path}' for model '{model}'")
    tag = settings.values.get("TF_GRAPH_TAG", _SERVE)
    name = settings.values.get("TF_SIGNATURE_DEF", _DEFAULT_SIGNATURE)
    try:
        loaded = tf.saved_model.load(path, tags=[tag])
    except Exception as error:  # the library raises many types for an unusable file
        raise _load_error(model, path, error) from error
    if name not in loaded.signatures:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: '{path}' has no signature '{name}', there is"
            f" {', '.join(loaded.signatures) or 'none'}"
        )
    function = loaded.signatures[name]

    def call(inputs: Mapping[str, Array]) -> Mapping[str, Array]:
        given = {name: tf.convert_to_tensor(array) for name, array in inputs.items()}
        return {name: tensor.numpy() for name, tensor in function(**given).items()}

    return Graph(
        call,
        _describe_tensors(model, function.structured_input_signature[1]),
        _describe_tensors(model, function.structured_outputs),
        loaded,
    )


def load_frozen_graph(
    model: str, path: str, inputs: Sequence[str], outputs: Sequence[str]
) -> Graph:
    """Loads a frozen graph between the named inputs and outputs. Raises ModelFailure."""
    if not os.path.isfile(path):
        raise ModelFailure(f"unable to find '{path}' for model '{model}'")
    definition = tf.compat.v1.GraphDef()
    try:
        with open(path, "rb") as file:
            definition.ParseFromString(file.read())
        whole = tf.compat.v1.wrap_function(
            lambda: tf.compat.v1.import_graph_def(definition, name=""), []
        )
    except Exception as error:  # as above
        raise _load_error(model, path, error) from error
    known = {operation.name for operation in whole.graph.get_operations()}
    for kind, names in (("input", inputs), ("output", outputs)):
        for name in names:
            if name.partition(":")[0] not in known:
                raise ModelFailure(
                    f"unexpected inference {kind} '{name}', the graph has no operation of that name"
                )
    tensors_by_name = {
        name: whole.graph.get_tensor_by_name(_tensor_name(name)) for name in (*inputs, *outputs)
    }
    function = whole.prune(
        [tensors_by_name[name] for name in inputs], [tensors_by_name[name] for name in outputs]
    )

    def call(given: Mapping[str, Array]) -> Mapping[str, Array]:
        results = function(*(tf.convert_to_tensor(given[name]) for name in inputs))
        return {name: tensor.numpy() for name, tensor in zip(outputs, results)}

    return Graph(
        call,
        _describe_tensors(model, {name: tensors_by_name[name] for name in inputs}),
        _describe_tensors(model, {name: tensors_by_name[name] for name in outputs}),
        whole,
    )


def _tensor_name(name: str) -> str:
    return name if ":" in name else f"{name}:0"


def _load_error(model: str, path: str, error: Exception) -> ModelFailure:
    return ModelFailure(
        f"model '{model}' cannot be loaded: tensorflow {tf.__version__} cannot use '{path}':"
        f" {error}"
    )


def _describe_tensors(model: str, tensors: Mapping[str, Any]) -> List[ModelTensor]:
    found: List[ModelTensor] = []
    for name, tensor in tensors.items():
        kind = tensor.dtype.name
        if kind not in _TYPES:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its tensor '{name}' has the type {kind}, which"
                " this backend does not take"
            )
        shape: Optional[List[int]] = None
        if tensor.shape.rank is not None:
            shape = [-1 if size is None else size for size in tensor.shape.as_list()]
        found.append(ModelTensor(name, _TYPES[kind], shape))
    return found
