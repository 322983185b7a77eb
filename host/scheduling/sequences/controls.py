"""Control tensors, which tell a model where in its sequence a request is.

Source: docs/reference/configuration-and-scheduling.md, "Control tensors".
"""

from __future__ import annotations

import struct
from collections.abc import Callable
from itertools import product

from host.config.schema import ModelConfig, pb
from host.inference.request import Tensor
from host.scheduling.sequences.call import END, START, Id
from stub.wire.datatypes import NAMES

_Control = pb.ModelSequenceBatching.Control
_LISTS = (("int32_false_true", "INT32", "<i"), ("fp32_false_true", "FP32", "<f"))
_SIZES = {"UINT64": 8, "INT64": 8, "UINT32": 4, "INT32": 4}


class ControlTensors:
    """Compiled from a `ModelSequenceBatching` message; `batching` adds a batch dimension."""

    def __init__(self, batcher: ModelConfig, batching: bool) -> None:
        self._shape = [1, 1] if batching else [1]
        found: dict[int, Callable[[bool], Tensor]] = {}
        self._id: tuple[str, str] | None = None
        for tensor in batcher.control_input:
            for control in tensor.control:
                if control.kind == _Control.CONTROL_SEQUENCE_CORRID:
                    self._id = tensor.name, NAMES[control.data_type]
                else:
                    found[control.kind] = self._boolean(tensor.name, control)
        kinds = (
            _Control.CONTROL_SEQUENCE_START,
            _Control.CONTROL_SEQUENCE_END,
            _Control.CONTROL_SEQUENCE_READY,
        )
        self._flags = {
            values: [found[kind](value) for kind, value in zip(kinds, values, strict=True)
                     if kind in found]
            for values in product((False, True), repeat=3)
        }  # fmt: skip

    def _boolean(self, name: str, control: ModelConfig) -> Callable[[bool], Tensor]:
        shape = self._shape
        for field, datatype, form in _LISTS:
            values = list(getattr(control, field))
            if values:
                return lambda on: Tensor(name, datatype, shape, struct.pack(form, values[on]))
        booleans = list(control.bool_false_true)
        return lambda on: Tensor(name, "BOOL", shape, bytes([booleans[on]]))

    def tensors_for(self, flags: int, correlation_id: Id) -> list[Tensor]:
        """The control tensors of a request."""
        return self._tensors((bool(flags & START), bool(flags & END), True), correlation_id)

    def padding_tensors(self) -> list[Tensor]:
        """The control tensors of a row without a request."""
        return self._tensors((False, False, False), "" if self._of_strings else 0)

    @property
    def _of_strings(self) -> bool:
        return self._id is not None and self._id[1] == "BYTES"

    def _tensors(self, flags: tuple[bool, bool, bool], correlation_id: Id) -> list[Tensor]:
        tensors = self._flags[flags]
        if self._id is None:
            return tensors
        name, datatype = self._id
        if isinstance(correlation_id, str):
            text = correlation_id.encode()
            data = struct.pack("<I", len(text)) + text
        else:
            data = (correlation_id & (1 << 64) - 1).to_bytes(8, "little")[: _SIZES.get(datatype)]
        return [*tensors, Tensor(name, datatype, self._shape, data)]
