"""Implicit states: tensors kept between the requests of a sequence.

Source: docs/reference/configuration-and-scheduling.md, "Implicit state".
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import NoReturn

from host.config.schema import ConfigPart, ModelConfig, pb
from host.errors import internal, invalid_argument
from host.inference.request import Tensor
from host.system.regular_file import read_file
from stub.wire.datatypes import NAMES, SIZES

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
