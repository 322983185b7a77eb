"""Opens a plan with the TensorRT library, and describes its tensors."""

import ctypes
import os
from typing import Any, List, Mapping, NamedTuple, Tuple

import tensorrt

import pb_utils
from stub.backends.model_settings import Settings
from stub.backends.tensorrt.tensorrt_plan import Layout, Plan, PlanTensor, ProfileRange
from stub.user_model import ModelFailure

_TYPES = {
    "BOOL": "TYPE_BOOL",
    "UINT8": "TYPE_UINT8",
    "INT8": "TYPE_INT8",
    "INT32": "TYPE_INT32",
    "INT64": "TYPE_INT64",
    "HALF": "TYPE_FP16",
    "FLOAT": "TYPE_FP32",
    "BF16": "TYPE_BF16",
}


class ErrorLog(tensorrt.ILogger):  # type: ignore[misc]
    """Forwards the library's log; `errors` collects the errors since the last `take_errors`."""

    def __init__(self) -> None:
        tensorrt.ILogger.__init__(self)
        self.errors: List[str] = []

    def log(self, severity: Any, msg: str) -> None:
        """Logs a message. Called by the library."""
        levels = tensorrt.ILogger.Severity
        if severity in (levels.ERROR, levels.INTERNAL_ERROR):
            self.errors.append(msg)
            pb_utils.Logger.log_error(f"TensorRT: {msg}")
        elif severity == levels.WARNING:
            pb_utils.Logger.log_warn(f"TensorRT: {msg}")
        else:
            pb_utils.Logger.log_verbose(f"TensorRT: {msg}")

    def take_errors(self) -> str:
        """Returns the collected errors as one text, and clears them."""
        text, self.errors = "; ".join(self.errors), []
        return text or "the library gives no reason"


class OpenedPlan(NamedTuple):
    """An engine, and the objects that must outlive it."""

    engine: Any
    log: ErrorLog
    runtime: Any


def open_plan(
    model: str, path: str, settings: Settings, group: Mapping[str, Any], capability: str
) -> OpenedPlan:
    """Deserializes the file on the current GPU. Raises ModelFailure.

    `settings` are those of the command line: `plugins` and `version-compatible`.
    """
    if not os.path.isfile(path):
        raise ModelFailure(f"unable to find '{path}' for model '{model}'")
    for library in filter(None, settings.values.get("plugins", "").split(";")):
        try:
            ctypes.CDLL(library, mode=ctypes.RTLD_GLOBAL)
        except OSError as error:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: the library of plugins '{library}' that"
                f" --backend-config=tensorrt,plugins names cannot be used: {error}"
            ) from error
    tensorrt.init_libnvinfer_plugins(None, "")
    log = ErrorLog()
    runtime = tensorrt.Runtime(log)
    if settings.get_bool("version-compatible", False):
        runtime.engine_host_code_allowed = True
    for device in group.get("secondary_devices", ()):
        runtime.DLA_core = int(device.get("device_id", 0))
    with open(path, "rb") as file:
        engine = runtime.deserialize_cuda_engine(file.read())
    if engine is None:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: TensorRT {tensorrt.__version__} cannot use"
            f" '{path}' on a GPU of compute capability {capability}: {log.take_errors()}"
        )
    return OpenedPlan(engine, log, runtime)


def describe(model: str, engine: Any) -> Plan:
    """Returns the description of an engine. Raises ModelFailure for a type that Triton lacks."""
    implicit = 0
    if getattr(engine, "has_implicit_batch_dimension", False):  # removed in TensorRT 10
        implicit = int(engine.max_batch_size)
    profiles = int(engine.num_optimization_profiles)
    names = [engine.get_tensor_name(index) for index in range(engine.num_io_tensors)]
    tensors = tuple(_describe(model, engine, name, profiles, implicit) for name in names)
    return Plan(tensors, profiles, implicit)


def _describe(model: str, engine: Any, name: str, profiles: int, implicit: int) -> PlanTensor:
    kind = engine.get_tensor_dtype(name).name
    if kind not in _TYPES:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: its tensor '{name}' has the type {kind}, which has"
            " no data type in Triton"
        )
    is_input = engine.get_tensor_mode(name) == tensorrt.TensorIOMode.INPUT
    of_shape = bool(engine.is_shape_inference_io(name))
    ranges: Tuple[ProfileRange, ...] = ()
    if is_input and not implicit:
        ranges = _ranges(engine, name, profiles, of_shape)
    return PlanTensor(
        name,
        is_input,
        _TYPES[kind],
        tuple(engine.get_tensor_shape(name)),
        ranges,
        of_shape,
        engine.get_tensor_location(name) == tensorrt.TensorLocation.HOST,
        _layout(engine, name, implicit),
    )


def _ranges(engine: Any, name: str, profiles: int, of_shape: bool) -> Tuple[ProfileRange, ...]:
    found: List[ProfileRange] = []
    for profile in range(profiles):
        if of_shape:
            # The Python binding has the two argument names swapped.
            ends = engine.get_tensor_profile_values(profile, name)
        else:
            ends = engine.get_tensor_profile_shape(name, profile)
        if len(ends) != 3:
            return ()  # the shape has no limits
        found.append(ProfileRange(*(tuple(end) for end in ends)))
    return tuple(found)


def _layout(engine: Any, name: str, implicit: int) -> Layout:
    form = engine.get_tensor_format(name)
    if form == tensorrt.TensorFormat.LINEAR:
        return Layout()
    # The engine does not count an implicit batch dimension, which precedes all others.
    along = engine.get_tensor_vectorized_dim(name)
    components = engine.get_tensor_components_per_element(name) if along >= 0 else 1
    return Layout(False, along + 1 if implicit and along >= 0 else along, components, form.name)
