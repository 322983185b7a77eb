"""Creates ONNX Runtime sessions: options, execution providers, and the model's file."""

import os
from typing import Any, Dict, List, Mapping, Sequence, Tuple

import onnxruntime

from stub.backends.model_contract import ModelTensor
from stub.backends.model_settings import Placement, Settings
from stub.user_model import ModelFailure

DEFAULT_FILE_NAME = "model.onnx"

_CPU, _CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
_CPU_ACCELERATORS = {"openvino": "OpenVINOExecutionProvider"}
_GPU_ACCELERATORS = {"tensorrt": "TensorrtExecutionProvider", "cuda": _CUDA}
_PACKAGES = {
    "OpenVINOExecutionProvider": "onnxruntime-openvino",
    "TensorrtExecutionProvider": "onnxruntime-gpu",
    _CUDA: "onnxruntime-gpu",
}
_CUDA_PARAMETERS = (
    "arena_extend_strategy",
    "cudnn_conv_algo_search",
    "cudnn_conv_use_max_workspace",
    "do_copy_in_default_stream",
    "enable_cuda_graph",
    "gpu_mem_limit",
    "use_tf32",
)
_INTEGER_PARAMETERS = {  # the provider's names for Triton's numbers
    "cudnn_conv_algo_search": ("EXHAUSTIVE", "HEURISTIC", "DEFAULT"),
    "arena_extend_strategy": ("kNextPowerOfTwo", "kSameAsRequested"),
}
_SESSION_ENTRIES = ("session.", "optimization.", "ep.", "mlas.")
"""Prefixes of the parameters that are session configuration entries."""

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
    "float": "TYPE_FP32",
    "double": "TYPE_FP64",
    "string": "TYPE_STRING",
}

Provider = Tuple[str, Dict[str, str]]


def session_options(config: Mapping[str, Any], settings: Settings) -> Any:
    """Returns the SessionOptions of a configuration.

    See docs/reference/configuration-and-scheduling.md, "Optimization settings" and "Parameters with
    a meaning". Raises ModelFailure.
    """
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3  # errors only; the warnings are about how a model was exported
    options.graph_optimization_level = _optimization(config)
    parallel = settings.get_choice("execution_mode", "0", ("0", "1")) == "1"
    modes = onnxruntime.ExecutionMode
    options.execution_mode = modes.ORT_PARALLEL if parallel else modes.ORT_SEQUENTIAL
    options.intra_op_num_threads = settings.get_int("intra_op_thread_count", 0)
    options.inter_op_num_threads = settings.get_int("inter_op_thread_count", 0)
    options.enable_cpu_mem_arena = settings.get_bool("enable_mem_arena", True)
    options.enable_mem_pattern = settings.get_bool("enable_mem_pattern", True)
    for key, text in settings.values.items():
        if key.startswith(_SESSION_ENTRIES):
            options.add_session_config_entry(key, text)
    return options


def _optimization(config: Mapping[str, Any]) -> Any:
    graph = config.get("optimization", {}).get("graph", {})
    level = int(graph.get("level", 0))
    levels = onnxruntime.GraphOptimizationLevel
    if level not in (-1, 0, 1, 2):
        raise ModelFailure(
            f"model '{config['name']}' cannot be loaded: optimization.graph.level must be -1"
            f" (basic), 0 (all), 1 (extended) or 2 (none), got {level}"
        )
    return {
        -1: levels.ORT_ENABLE_BASIC,
        0: levels.ORT_ENABLE_ALL,
        1: levels.ORT_ENABLE_EXTENDED,
        2: levels.ORT_DISABLE_ALL,
    }[level]


def execution_providers(
    config: Mapping[str, Any], settings: Settings, placement: Placement
) -> List[Provider]:
    """Returns the execution providers by preference; the CPU is always the last.

    Raises ModelFailure if one is unknown, or missing in the installed package.
    """
    accelerators = config.get("optimization", {}).get("execution_accelerators", {})
    device = {"device_id": str(placement.device)}
    if placement.on_gpu:
        accelerator = accelerators.get("gpu_execution_accelerator", ())
        providers = [_accelerator(each, _GPU_ACCELERATORS, device) for each in accelerator]
        if _CUDA not in [name for name, _ in providers]:
            providers.append((_CUDA, {**device, **_cuda_parameters(settings.values)}))
    else:
        accelerator = accelerators.get("cpu_execution_accelerator", ())
        providers = [_accelerator(each, _CPU_ACCELERATORS, {}) for each in accelerator]
    available = onnxruntime.get_available_providers()
    for name, _ in providers:
        if name not in available:
            raise _missing_provider_error(
                config["name"], name, placement, f"it has {', '.join(available)}"
            )
    return [*providers, (_CPU, {})]


def _accelerator(
    accelerator: Mapping[str, Any], known: Mapping[str, str], device: Mapping[str, str]
) -> Provider:
    name = accelerator["name"]
    if name not in known:
        raise ModelFailure(
            f"unknown Execution Accelerator '{name}' is requested; there is {', '.join(known)}"
        )
    parameters: Mapping[str, str] = accelerator.get("parameters", {})
    if name == "tensorrt":
        return known[name], {**device, **_tensorrt_parameters(parameters)}
    if name == "cuda":
        return known[name], {**device, **_cuda_parameters(parameters, strict=True)}
    return known[name], {**device, **parameters}


def _cuda_parameters(texts: Mapping[str, str], strict: bool = False) -> Dict[str, str]:
    chosen: Dict[str, str] = {}
    for key, text in texts.items():
        if key not in _CUDA_PARAMETERS:
            if strict:
                raise ModelFailure(
                    f"unknown parameter '{key}' is provided for CUDA Execution Accelerator;"
                    f" there is {', '.join(_CUDA_PARAMETERS)}"
                )
            continue
        words = _INTEGER_PARAMETERS.get(key, ())
        chosen[key] = words[int(text)] if text.isdecimal() and int(text) < len(words) else text
    return chosen


def _tensorrt_parameters(parameters: Mapping[str, str]) -> Dict[str, str]:
    """Translates Triton's parameter names; names that begin with `trt_` are the provider's own."""
    chosen: Dict[str, str] = {}
    for key, text in parameters.items():
        if key == "precision_mode" and text in ("FP32", "FP16", "INT8"):
            chosen.update({} if text == "FP32" else {f"trt_{text.lower()}_enable": "1"})
        elif key == "max_workspace_size_bytes":
            chosen["trt_max_workspace_size"] = text
        elif key.startswith("trt_"):
            chosen[key] = text
        else:
            raise ModelFailure(
                f"unknown parameter '{key}' of value '{text}' is provided for TensorRT Execution"
                " Accelerator; there is precision_mode (FP32, FP16, INT8),"
                " max_workspace_size_bytes, and what begins with trt_"
            )
    return chosen


def _missing_provider_error(
    model: str, provider: str, placement: Placement, why: str
) -> ModelFailure:
    here = "KIND_CPU" if placement.on_gpu else "no cpu_execution_accelerator"
    return ModelFailure(
        f"model '{model}' cannot be loaded: its instance '{placement.instance}' needs the execution"
        f" provider {provider}, which the installed onnxruntime {onnxruntime.__version__} does not"
        f" offer ({why}); install {_PACKAGES[provider]} in its place, or configure {here}"
    )


def find_model_file(path: str, instance: str) -> str:
    """Returns the model's file: `path`, or a file in the folder `path`. Raises ModelFailure."""
    if not os.path.exists(path):
        raise ModelFailure(f"failed to stat file {path}")
    if not os.path.isdir(path):
        return path
    inner = os.path.join(path, DEFAULT_FILE_NAME)
    if not os.path.isfile(inner):
        raise ModelFailure(f"unable to find '{inner}' for model instance '{instance}'")
    return inner


def register_operators(config: Mapping[str, Any], options: Any, model_dir: str) -> None:
    """Loads the custom operator libraries of a configuration. Raises ModelFailure."""
    for name in config.get("model_operations", {}).get("op_library_filename", ()):
        try:
            options.register_custom_ops_library(os.path.join(model_dir, name))
        except Exception as error:  # the library raises errors without a common type
            raise ModelFailure(
                f"model '{config['name']}' cannot be loaded: its library of custom operators"
                f" '{name}' cannot be used: {error}"
            ) from error


def open_session(
    model: str, path: str, options: Any, providers: Sequence[Provider], placement: Placement
) -> Any:
    """Returns an InferenceSession that uses all providers. Raises ModelFailure."""
    try:
        session = onnxruntime.InferenceSession(path, options, providers=list(providers))
    except Exception as error:  # as above
        raise ModelFailure(
            f"model '{model}' cannot be loaded: onnxruntime {onnxruntime.__version__} cannot use"
            f" '{path}': {error}"
        ) from error
    session.disable_fallback()
    for name, _ in providers:
        if name not in session.get_providers():  # the library only prints a warning
            raise _missing_provider_error(
                model, name, placement, "its libraries could not be loaded"
            )
    return session


def model_tensors(model: str, session: Any) -> Tuple[List[ModelTensor], List[ModelTensor]]:
    """Returns the inputs and the outputs of the graph; initializers are optional inputs.

    Raises ModelFailure if one is not a tensor, or has a type that Triton lacks.
    """
    inputs = [_model_tensor(model, node, False) for node in session.get_inputs()]
    inputs += [_model_tensor(model, node, True) for node in session.get_overridable_initializers()]
    return inputs, [_model_tensor(model, node, False) for node in session.get_outputs()]


def _model_tensor(model: str, node: Any, optional: bool) -> ModelTensor:
    kind = node.type
    element = kind[len("tensor(") : -1] if kind.startswith("tensor(") else ""
    if element not in _TYPES:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its tensor '{node.name}' has the type {kind},"
            " which has no data type in Triton"
        )
    # The library reports both "any shape" and "no dimensions" as an empty list.
    shape = [size if isinstance(size, int) else -1 for size in node.shape]
    return ModelTensor(node.name, _TYPES[element], shape, optional)


def run_options(settings: Settings) -> Any:
    """Returns the RunOptions of every run; None if no parameter sets any."""
    name = "memory.enable_memory_arena_shrinkage"
    if name not in settings.values:
        return None
    text = settings.values[name]
    options = onnxruntime.RunOptions()
    # Triton passes the text to the library unchanged, for example "cpu:0;gpu:0".
    options.add_run_config_entry(name, text)
    return options
