"""Serves an ONNX model with ONNX Runtime."""

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np

import pb_utils
from pb_utils._datatypes import CONFIG_CODES, STORAGE
from stub.backends.batch import MIN_BYTES, Array, allocate_output, decode_texts, restore_scalars
from stub.backends.framework_model import FrameworkModel, import_library
from stub.backends.model_contract import ModelContract, ModelTensor
from stub.backends.model_settings import Placement, Settings, model_path, parse_config


class _OutputShape(NamedTuple):
    """The shape of an output: `rest`, after the number of rows if `batched`."""

    dtype: Any
    rest: List[int]
    batched: bool

    def shape(self, rows: int) -> List[int]:
        return [rows, *self.rest] if self.batched else self.rest


class BoundSession:
    """A session, and the shapes of its outputs as far as the model's file determines them.

    If the session runs on a CPU, and the first dimension of an output has the same name as that of
    each input, the output has as many rows as the inputs.
    """

    def __init__(
        self,
        session: Any,
        inputs: Sequence[ModelTensor],
        outputs: Sequence[ModelTensor],
        contract: ModelContract,
        placement: Placement,
    ) -> None:
        self._session = session
        self._output_shapes: Dict[str, _OutputShape] = {}
        self._batch_input = ""
        if placement.on_gpu or any(tensor.data_type == "TYPE_STRING" for tensor in inputs):
            return  # text tensors cannot be bound
        first = {node.shape[0] if node.shape else None for node in session.get_inputs()}
        rows = first.pop() if len(first) == 1 else None
        if isinstance(rows, str):
            self._batch_input = inputs[0].name
        for node, tensor in zip(session.get_outputs(), outputs):
            dims = list(tensor.shape or ())
            batched = bool(dims) and isinstance(rows, str) and node.shape[0] == rows
            rest = dims[1:] if batched else dims
            if not rest or min(rest) < 0 or tensor.data_type == "TYPE_STRING":
                continue
            if contract.supports_batching and not batched:
                continue
            dtype = STORAGE[CONFIG_CODES[tensor.data_type]]
            self._output_shapes[tensor.name] = _OutputShape(dtype, rest, batched)

    def run(self, wanted: List[str], inputs: Dict[str, Array], options: Any) -> Mapping[str, Array]:
        """Returns the wanted outputs. Raises what the library raises."""
        rows = len(inputs[self._batch_input]) if self._batch_input else 1
        placed: Dict[str, Array] = {}
        for name in wanted:
            known = self._output_shapes.get(name)
            if known is None:
                continue
            shape = known.shape(rows)
            if math.prod(shape) * known.dtype.itemsize >= MIN_BYTES:
                array = allocate_output(known.dtype, shape)
                if array is not None:
                    placed[name] = array
        if placed:
            try:
                return self._run_bound(wanted, inputs, placed, options)
            except Exception:  # an output differs from its declared shape
                placed.clear()
        return dict(zip(wanted, self._session.run(wanted, inputs, options)))

    def _run_bound(
        self,
        wanted: List[str],
        inputs: Mapping[str, Array],
        placed: Dict[str, Array],
        options: Any,
    ) -> Mapping[str, Array]:
        binding = self._session.io_binding()
        for name, array in inputs.items():
            binding.bind_cpu_input(name, array)
        for name in wanted:
            if name in placed:
                array = placed[name]
                binding.bind_output(
                    name, "cpu", 0, array.dtype.type, array.shape, array.ctypes.data
                )
            else:
                binding.bind_output(name)
        self._session.run_with_iobinding(binding, options)
        results = binding.get_outputs()
        return {
            name: placed[name] if name in placed else result.numpy()
            for name, result in zip(wanted, results)
        }


_COMMAND_LINE = ("intra_op_thread_count", "inter_op_thread_count")
_READER = {"model_instance_kind": "CPU", "model_instance_device_id": "0"}
"""The placement of an instance that only reads the tensors of the file."""


class TritonPythonModel(FrameworkModel):
    """One session."""

    @classmethod
    def _read_tensors(
        cls, config: Dict[str, Any]
    ) -> Tuple[Sequence[ModelTensor], Sequence[ModelTensor]]:
        model = config["name"]
        library = _load_library(model)
        placement = Placement({**_READER, "model_instance_name": model})
        session = _open_session(library, config, Settings(model, {}), placement, only_read=True)
        tensors: Tuple[Sequence[ModelTensor], Sequence[ModelTensor]]
        tensors = library.model_tensors(model, session)
        return tensors

    def initialize(self, args: Mapping[str, str]) -> None:
        """Opens the file and checks the configuration against it."""
        config, placement = parse_config(args), Placement(args)
        self._contract = ModelContract(config)
        library = _load_library(self._contract.model)
        fallback = {
            key: self.backend_config[key] for key in _COMMAND_LINE if key in self.backend_config
        }
        settings = Settings.from_config(config, fallback)
        self._session = _open_session(library, config, settings, placement)
        inputs, outputs = library.model_tensors(self._contract.model, self._session)
        self._contract.check_model(inputs, outputs)
        self._scalars = [tensor.name for tensor in inputs if tensor.shape == []]
        self._texts = [tensor.name for tensor in inputs if tensor.data_type == "TYPE_STRING"]
        self._bound_session = BoundSession(
            self._session, inputs, outputs, self._contract, placement
        )
        self._run_options = library.run_options(settings)

    def _run(self, inputs: Dict[str, Array], wanted: List[str]) -> Mapping[str, Array]:
        for name in self._texts:
            if name in inputs:
                inputs[name] = _as_text(name, inputs[name])
        restore_scalars(inputs, self._scalars)
        return self._bound_session.run(wanted, inputs, self._run_options)

    def finalize(self) -> None:
        """Deletes the session before the interpreter exits."""
        del self._session, self._bound_session


def _load_library(model: str) -> Any:
    module = "stub.backends.onnxruntime.onnx_session"
    return import_library(model, "onnxruntime", module, "onnxruntime")


def _open_session(
    library: Any,
    config: Dict[str, Any],
    settings: Settings,
    placement: Placement,
    only_read: bool = False,
) -> Any:
    folder = pb_utils.get_model_dir()
    path = library.find_model_file(model_path(config, folder), placement.instance)
    if only_read:
        config = {**config, "optimization": {"graph": {"level": 2}}}
    options = library.session_options(config, settings)
    library.register_operators(config, options, folder)
    providers = library.execution_providers(config, settings, placement)
    return library.open_session(config["name"], path, options, providers, placement)


def _as_text(name: str, array: Array) -> Array:
    """Returns the elements as `str`, which the library requires. Raises InvalidInput."""
    texts = decode_texts(name, array)
    decoded = np.empty(len(texts), dtype=np.object_)
    decoded[:] = texts
    return decoded.reshape(array.shape)
