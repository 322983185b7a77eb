"""A request of a sequence, with the control tensors and the states that it gets.

Source: docs/reference/scheduling.md, "Control tensors" and "Implicit state".
"""

from __future__ import annotations

import logging
import os
import struct
from abc import ABC, abstractmethod
from collections import abc, deque
from collections.abc import Callable
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from typing import NoReturn

from host.config.schema import ConfigPart, ModelConfig, pb
from host.errors import HostError, internal, invalid_argument
from host.inference.call import Call, CallHolder, CallState
from host.inference.request import InferResponse, SharedMemoryBytes, Tensor, serialize_bytes
from host.scheduling.ordering import OrderedCall
from host.system.files import read_file
from pb_utils._datatypes import NAMES, SIZES

START, END = 1, 2
"""Flags of requests."""

Id = int | str


class SlotHolder(CallHolder, ABC):
    """Has the slots of an instance; each of them is for one sequence."""

    @abstractmethod
    def slot_ready(self, number: int) -> None:
        """Called when a slot may have a call to run."""

    @abstractmethod
    def release_slot(self, number: int) -> None:
        """Frees a slot whose sequence has ended."""

    @abstractmethod
    def report_expired(self) -> None:
        """Tells the model which sequences have ended without an END."""


class Sequence:
    """Requests that share a correlation id, from a START to an END, and their slot."""

    __slots__ = (
        "id",
        "calls",
        "sequence_batch",
        "number",
        "ending",
        "overdue",
        "expired",
        "dead",
        "states",
    )

    def __init__(self, correlation_id: Id) -> None:
        self.id = correlation_id
        self.calls: deque[SequenceCall] = deque()  # calls that were not passed on yet
        self.sequence_batch: SlotHolder | None = None  # None while the sequence is in the backlog
        self.number = 0
        self.ending = False  # no more requests arrive: the slot is free once no call is left
        self.overdue = False  # it was idle for too long in the backlog
        self.expired = False  # it ends without a request with END: the model is told
        self.dead = False
        self.states: dict[str, Tensor] | None = None


class SequenceCall(OrderedCall):
    """A call of a sequence. It can be run again, and its response has the next states."""

    prepares_responses = True

    sequence: Sequence | None = None
    iterates: bool = False
    again: bool = False
    _given: int = 0
    _wanted: list[str] = []
    _kept: dict[str, tuple[str, str]] = {}
    _states: dict[str, Tensor] = {}

    def add_controls_and_states(
        self,
        extra: abc.Sequence[Tensor],
        outputs: abc.Sequence[str],
        kept: dict[str, tuple[str, str]],
        states: dict[str, Tensor],
    ) -> None:
        """Adds controls and states to the client's tensors.

        `kept`: outputs that are states; their input names and data types by output name. `states`:
        where they go. `outputs`: those that clients may ask for.
        """
        request = self.request
        self._given = len(request.inputs)
        request.inputs = [*request.inputs, *extra]
        if kept:
            self._wanted = list(request.requested_outputs or outputs)
            self._kept, self._states = kept, states
            more = [name for name in kept if name not in self._wanted]
            request.requested_outputs = self._wanted + more

    def remove_controls_and_states(self) -> None:
        """Restores the request as the client sent it."""
        request = self.request
        request.inputs = request.inputs[: self._given]
        if self._kept:
            request.requested_outputs = self._wanted

    def prepare_response(self, response: InferResponse) -> None:
        """Keeps the states, and removes those that the client did not request."""
        if not self._kept or response.error is not None:
            return
        try:
            for tensor in response.outputs:
                if tensor.name in self._kept:
                    self._keep_state(tensor)
        except HostError as error:
            response.error = error.with_traceback(None)  # it refers to the response
            response.outputs = []
            return
        response.outputs = [
            tensor
            for tensor in response.outputs
            if tensor.name not in self._kept or tensor.name in self._wanted
        ]

    def _keep_state(self, tensor: Tensor) -> None:
        name, datatype = self._kept[tensor.name]
        if tensor.datatype != datatype:
            raise _wrong_type(tensor, datatype)
        data, owner = tensor.data, tensor.owner
        if isinstance(owner, SharedMemoryBytes):  # the client gets it too, and could change it
            data, owner = bytes(owner), None
        self._states[name] = Tensor(name, datatype, tensor.shape, data, owner)

    def try_reschedule(self) -> bool:
        """Whether the model may run the request once more."""
        sequence = self.sequence
        self.again = self.iterates and sequence is not None and not sequence.dead
        return self.again


class PaddingCall(Call):
    """Fills the row of a slot without a request; its response is dropped."""

    def respond(self, response: InferResponse | None, final: bool = True) -> None:
        """Drops the response."""
        if final:
            self.state = CallState.FINISHED
            self.request.inputs = []


def _wrong_type(tensor: Tensor, expected: str) -> HostError:
    return invalid_argument(
        f"state output '{tensor.name}' has data-type '{tensor.datatype}', but its configuration"
        f" in 'sequence_batching' expects '{expected}'"
    )


_Control = pb.ModelSequenceBatching.Control
_LISTS = (("int32_false_true", "INT32", "<i"), ("fp32_false_true", "FP32", "<f"))
_CORRELATION_ID_SIZES = {"UINT64": 8, "INT64": 8, "UINT32": 4, "INT32": 4}


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
            data = serialize_bytes([correlation_id.encode()])
        else:
            data = (correlation_id & (1 << 64) - 1).to_bytes(8, "little")[
                : _CORRELATION_ID_SIZES.get(datatype)
            ]
        return [*tensors, Tensor(name, datatype, self._shape, data)]


_log = logging.getLogger("pbhost")

_FOLDER = "initial_state"
_SIZES = {**SIZES, "BYTES": 4}  # an empty string is its length alone


@dataclass(frozen=True, slots=True)
class _InitialState:
    """The value of a state when its sequence starts."""

    name: str
    datatype: str
    shape: list[int]
    data: bytes


class SequenceStates:
    """The `state` entries of a configuration. Reads files. Raises HostError."""

    def __init__(self, config: ModelConfig, directory: Path) -> None:
        entries = config.sequence_batching.state
        self.kept = {
            entry.output_name: (entry.input_name, NAMES.get(entry.data_type, "<invalid>"))
            for entry in entries
        }
        """Input name and data type of each state, by output name."""
        lead = [1] if config.max_batch_size > 0 else []
        self._problem = ""
        self._first: list[_InitialState] = []
        names: set[str] = set()
        for entry in entries:
            if entry.input_name in names:
                _invalid_state(f"State input name '{entry.input_name}' specified more than once.")
            names.add(entry.input_name)
            dims, data = _content(entry, directory)
            name, datatype = self.kept[entry.output_name]
            self._first.append(_InitialState(name, datatype, lead + dims, data))
            self._problem = self._problem or _growable(entry, config)

    def initial_states(self) -> dict[str, Tensor]:
        """The states of a new sequence by input name; logs if there are none."""
        if self._problem:
            _log.error("Failed to initialize sequence state: %s", self._problem)
            return {}
        return {s.name: Tensor(s.name, s.datatype, s.shape, s.data) for s in self._first}


def _growable(entry: ConfigPart, config: ModelConfig) -> str:
    """Why a state cannot have growable memory, "" if it does not ask for it."""
    name = entry.input_name
    if not entry.use_growable_memory:
        return ""
    if not entry.use_same_buffer_for_input_output:
        return (
            "In order to 'use_growable_memory', you must also enable 'use_single_buffer' for state"
            f" input name '{name}'."
        )
    if any(group.kind != pb.ModelInstanceGroup.KIND_GPU for group in config.instance_group):
        return (
            "'use_growable_memory' can only work with KIND_GPU model instances right now. Please"
            " either change the instance type to KIND_GPU or set 'use_growable_memory' to false"
            f" for state input '{name}'."
        )
    return ""


def _content(entry: ConfigPart, directory: Path) -> tuple[list[int], bytes]:
    """Shape and bytes of one batch item. Raises HostError."""
    name = entry.input_name
    count = len(entry.initial_state)
    if count > 1:
        _invalid_state(
            f"initial_state field for state input '{name}' must contain exactly one or zero"
            f" element. Found '{count}' elements."
        )
    datatype = NAMES.get(entry.data_type, "<invalid>")
    if not count:
        dims = [1 if dim < 0 else dim for dim in entry.dims]
        return dims, bytes(prod(dims) * _SIZES.get(datatype, 0))
    initial = entry.initial_state[0]
    if initial.data_type != entry.data_type:
        _invalid_state(
            f"The data type used for 'initial_state' field of state '{name}' does not match the"
            " state data type."
        )
    if not initial.name:
        _invalid_state(
            f"Field 'name' must be set when using initial_state for state input '{name}'."
        )
    _check_dims(entry, list(initial.dims))
    dims = list(initial.dims)
    size = prod(dims) * _SIZES.get(datatype, 0)
    source = initial.WhichOneof("state_data")
    if source is None:
        _invalid_state(f"initial_state setting expects state'{name}' to have state_data set")
    if source == "zero_data":
        return dims, bytes(size)
    return dims, _read(directory, initial.data_file, datatype, size)


def _check_dims(entry: ConfigPart, given: list[int]) -> None:
    name, dims = entry.input_name, list(entry.dims)
    if len(given) != len(dims):
        _invalid_state(
            "Number of dimensions in 'initial_state' doesn't match the size of 'state' dimensions"
            f" for state input '{name}'. {len(given)} != {len(dims)}"
        )
    for want, got in zip(dims, given, strict=True):
        if got < 0:
            _invalid_state(
                f"'initial_state' field for state input name '{name}' contains variable dimensions."
            )
        if want not in (-1, got):
            _invalid_state(
                f"'initial_state' dim for input name '{name}' doesn't match 'state' dim"
                f" description. {got} != {want}"
            )


def _read(directory: Path, file: str, datatype: str, size: int) -> bytes:
    folder = directory / _FOLDER
    path = folder / file
    if not Path(os.path.normpath(path)).is_relative_to(os.path.normpath(folder)):
        _invalid_state(f"initial state file '{path}' is outside of its folder '{_FOLDER}'")
    try:
        data = read_file(path)
    except OSError as error:
        raise internal(f"failed to open text file for read {path}: {error.strerror}") from None
    if datatype == "BYTES":
        return data
    if len(data) < size:
        _invalid_state(
            f"initial_state setting expects {size} bytes, but the data provided from {file}only"
            f" has {len(data)} bytes."
        )
    return data[:size]


def _invalid_state(text: str) -> NoReturn:
    raise invalid_argument(text)


def read_states(config: ModelConfig, directory: Path) -> SequenceStates | None:
    """The states of a model, None if it has none. Reads files. Raises HostError."""
    return SequenceStates(config, directory) if config.sequence_batching.state else None
