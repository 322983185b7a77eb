"""The names that the packages export, and the cost of importing them."""

from __future__ import annotations

import pickle
from types import ModuleType

import pytest

import c_python_backend_utils
import pb_utils
import triton_python_backend_utils
from tests.imported_modules import imported_by

PUBLIC = {
    "Tensor",
    "InferenceRequest",
    "InferenceResponse",
    "TritonError",
    "TritonModelException",
    "Logger",
    "MetricFamily",
    "load_model",
    "unload_model",
    "is_model_ready",
    "PreferredMemory",
    "ModelConfig",
    "get_model_dir",
    "TRITONSERVER_MEMORY_GPU",
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_START",
    "TRITONSERVER_REQUEST_FLAG_SEQUENCE_END",
    "TRITONSERVER_RESPONSE_COMPLETE_FINAL",
    "TRITONSERVER_REQUEST_RELEASE_ALL",
    "TRITONSERVER_REQUEST_RELEASE_RESCHEDULE",
    "TRITON_STRING_TO_NUMPY",
    "triton_string_to_numpy",
    "triton_to_numpy_type",
    "numpy_to_triton_type",
    "serialize_byte_tensor",
    "deserialize_bytes_tensor",
    "get_input_tensor_by_name",
    "get_output_tensor_by_name",
    "get_input_config_by_name",
    "get_output_config_by_name",
    "get_parameter",
    "stack_inputs",
    "using_decoupled_model_transaction_policy",
}
BOUND = {
    "Tensor",
    "InferenceRequest",
    "InferenceResponse",
    "InferenceResponseSender",
    "InferenceTrace",
    "Logger",
    "MemoryType",
    "Metric",
    "MetricFamily",
    "MetricKind",
    "PreferredMemory",
    "ResponseIterator",
    "SharedMemory",
    "TritonError",
    "TritonModelException",
}
INSTANCES = {"shared_memory"}
KINDS = {"COUNTER", "GAUGE", "HISTOGRAM"}
SHARED = {
    "TRITONSERVER_MEMORY_CPU",
    "TRITONSERVER_MEMORY_GPU",
    "is_model_ready",
    "load_model",
    "unload_model",
}


def visible(module: ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and not isinstance(value, ModuleType)
    }


@pytest.mark.parametrize("module", [pb_utils, triton_python_backend_utils])
def test_both_packages_export_exactly_the_public_names(module: ModuleType) -> None:
    assert visible(module) == PUBLIC


def test_all_lists_every_public_name_once() -> None:
    assert set(pb_utils.__all__) == PUBLIC
    assert len(pb_utils.__all__) == len(PUBLIC)


def test_binding_module_exports_the_names_of_triton() -> None:
    names = visible(c_python_backend_utils)
    assert names == set(c_python_backend_utils.__all__) == BOUND | INSTANCES | KINDS | SHARED
    for name in (BOUND & PUBLIC) | SHARED:
        assert getattr(c_python_backend_utils, name) is getattr(pb_utils, name)
    for name in KINDS:
        kind = getattr(c_python_backend_utils, name)
        assert kind is getattr(c_python_backend_utils.MetricKind, name)


@pytest.mark.parametrize("name", sorted(BOUND))
def test_bound_classes_report_the_binding_module(name: str) -> None:
    assert getattr(c_python_backend_utils, name).__module__ == "c_python_backend_utils"


@pytest.mark.parametrize(
    "name",
    [
        "InferenceResponseSender",
        "InferenceTrace",
        "Logger",
        "Metric",
        "ResponseIterator",
        "SharedMemory",
    ],
)
def test_classes_without_constructor_cannot_be_instantiated(name: str) -> None:
    with pytest.raises(TypeError) as caught:
        getattr(c_python_backend_utils, name)()
    assert str(caught.value) == f"c_python_backend_utils.{name}: No constructor defined!"


def test_shared_memory_is_a_singleton_without_attributes() -> None:
    memory = c_python_backend_utils.shared_memory
    assert type(memory) is c_python_backend_utils.SharedMemory
    with pytest.raises(AttributeError):
        memory.x = 1  # type: ignore[attr-defined]  # wrong on purpose


def test_exceptions_and_enumerations_survive_pickling() -> None:
    error = pickle.loads(pickle.dumps(pb_utils.TritonModelException("boom")))
    assert type(error) is pb_utils.TritonModelException
    assert str(error) == "boom"
    for member in (
        pb_utils.TRITONSERVER_MEMORY_CPU,
        pb_utils.Logger.ERROR,
        pb_utils.TritonError.NOT_FOUND,
        pb_utils.MetricFamily.HISTOGRAM,
    ):
        assert pickle.loads(pickle.dumps(member)) is member


def test_the_constants_have_their_values() -> None:
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_START == 1
    assert pb_utils.TRITONSERVER_REQUEST_FLAG_SEQUENCE_END == 2
    assert pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_ALL == 1
    assert pb_utils.TRITONSERVER_REQUEST_RELEASE_RESCHEDULE == 2


def test_importing_loads_nothing_heavy() -> None:
    heavy = {"asyncio", "torch", "ml_dtypes", "grpc", "google", "msgspec", "zmq"}
    statement = "import triton_python_backend_utils, c_python_backend_utils"
    assert imported_by(statement, heavy) == set()


@pytest.mark.parametrize("module", [pb_utils, triton_python_backend_utils, c_python_backend_utils])
@pytest.mark.parametrize(
    ("name", "meant"), [("Tenor", "Tensor"), ("inferenceresponse", "InferenceResponse")]
)
def test_a_misspelt_name_is_followed_by_the_one_that_was_meant(
    module: ModuleType, name: str, meant: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(module, name)
    assert str(caught.value) == (
        f"module '{module.__name__}' has no attribute '{name}', did you mean '{meant}'?"
    )
    assert not hasattr(module, "volume")
    assert not hasattr(module, "__tensor__")


@pytest.mark.parametrize(
    ("owner", "name", "meant"),
    [
        (pb_utils.Logger, "volume", ""),
        (pb_utils.Logger, "log_eror", ", did you mean 'log_error'?"),
        (pb_utils.Logger, "WARN", ", did you mean 'WARNING'?"),
        (pb_utils.TritonError, "INVALID_ARGUMENT", ", did you mean 'INVALID_ARG'?"),
        (pb_utils.Tensor, "from_dl_pack", ", did you mean 'from_dlpack'?"),
        (pb_utils.MetricFamily, "COUNTERS", ", did you mean 'COUNTER'?"),
        (pb_utils.InferenceRequest, "excec", ", did you mean 'exec'?"),
        (pb_utils.Tensor, "__array__", ""),
    ],
)
def test_a_misspelt_attribute_of_a_class_is_followed_by_the_one_that_was_meant(
    owner: type, name: str, meant: str
) -> None:
    with pytest.raises(AttributeError) as caught:
        getattr(owner, name)
    assert str(caught.value) == (f"type object '{owner.__name__}' has no attribute '{name}'{meant}")
