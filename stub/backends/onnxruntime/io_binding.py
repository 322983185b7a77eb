"""Runs a session; large outputs of known size are written into shared memory."""

import math
from typing import Any, Dict, List, Mapping, NamedTuple, Sequence

from pb_utils._datatypes import CONFIG_CODES, STORAGE
from stub.backends.batch import Array
from stub.backends.contract import ModelContract, ModelTensor
from stub.backends.output_memory import MIN_BYTES, allocate_output
from stub.backends.settings import Placement


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
