"""The inputs and outputs of a model, and the conversion of values into its tensors."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from host.errors import HostError, internal, invalid_argument
from pb_utils import Tensor
from pb_utils._datatypes import BF16, BYTES, CODES, NAMES, SIZES, STORAGE, code_of, encode
from pb_utils._text_form import _to_bfloat16_bits

LARGE = 1 << 20
"""Bytes of a tensor that is worth a place in shared memory."""

_BF16_INFINITY, _BF16_MAX = 0x7F80, (2 - 2**-7) * 2.0**127

Value = Any
"""An array, a number, a text, bytes, or nested lists of them."""

_KINDS = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}
"""Kinds of numpy types that a list may have for a data type of each kind."""


class EncodedTensor(NamedTuple):
    """An input: its content is an array without gaps, or the bytes of a BYTES tensor."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    content: npt.NDArray[Any] | bytes

    @property
    def byte_size(self) -> int:
        """Size of the content in bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.nbytes


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """An input or output as the server describes it; sizes of -1 are variable."""

    name: str
    datatype: str
    shape: tuple[int, ...]
    optional: bool = False
    dtype: np.dtype[Any] = field(init=False, compare=False)
    as_stored: bool = field(init=False, compare=False)
    """Whether an array of this `dtype` is sent as it is; BF16 has bits in one of UINT16."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtype", STORAGE[CODES.get(self.datatype, 0)])
        object.__setattr__(self, "as_stored", self.datatype in SIZES and self.datatype != "BF16")

    def __str__(self) -> str:
        return f"{self.name} {self.datatype} {list(self.shape)}"


@dataclass(frozen=True, slots=True)
class Signature:
    """The inputs and outputs of a model. `max_batch_size`: 0 if it does not batch."""

    model: str
    versions: tuple[str, ...]
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    max_batch_size: int
    has_large_outputs: bool = field(init=False)
    """Whether the size of an output may be known before, and be large."""

    def __post_init__(self) -> None:
        large = any(
            min(spec.shape[self.max_batch_size > 0 :], default=0) >= 0
            and math.prod(spec.shape[self.max_batch_size > 0 :])
            * max(1, self.max_batch_size)
            * SIZES.get(spec.datatype, 0)
            >= LARGE
            for spec in self.outputs.values()
        )
        object.__setattr__(self, "has_large_outputs", large)

    def encode(self, values: Mapping[str, Value]) -> list[EncodedTensor]:
        """Returns the inputs of a request. Raises HostError INVALID_ARG if they do not fit."""
        encoded = []
        for name, value in values.items():
            spec = self.inputs.get(name)
            if spec is None:
                raise invalid_argument(
                    f"model '{self.model}' has no input '{name}'; {_list('inputs', self.inputs)}"
                )
            encoded.append(self._encode(spec, value))
        if len(encoded) < len(self.inputs):
            missing = [
                str(spec)
                for name, spec in self.inputs.items()
                if name not in values and not spec.optional
            ]
            if missing:
                raise invalid_argument(
                    f"model '{self.model}' requires more inputs: {', '.join(missing)}"
                )
        return encoded

    def _encode(self, spec: TensorSpec, value: Value) -> EncodedTensor:
        if type(value) is np.ndarray and value.dtype == spec.dtype and spec.as_stored:
            array, exact = value, True
        else:
            try:
                array, exact = _to_array(value, spec)
            except (ValueError, TypeError, OverflowError) as error:
                raise self._mismatch(spec, str(error)) from error
        shape = self._fit_shape(spec, array.shape, exact)
        if spec.datatype == "BYTES":
            return EncodedTensor(spec.name, spec.datatype, shape, encode(array))
        if not array.flags.c_contiguous:
            array = np.ascontiguousarray(array)
        return EncodedTensor(spec.name, spec.datatype, shape, array)

    def _fit_shape(self, spec: TensorSpec, given: tuple[int, ...], exact: bool) -> tuple[int, ...]:
        """Returns the shape of an input; one that is not exact may lack the batch dimension."""
        wanted, shape = spec.shape, given
        if not given and wanted:
            shape = (1,) * len(wanted)
        elif not exact and self.max_batch_size and len(given) == len(wanted) - 1:
            shape = (1, *given)
        fits = len(shape) == len(wanted)
        for size, expected in zip(shape, wanted):  # noqa: B905  # the slower check is above
            if size != expected and expected != -1:
                fits = False
        if not fits:
            raise self._mismatch(spec, f"got the shape {list(given)}")
        if self.max_batch_size and shape[0] > self.max_batch_size:
            raise self._mismatch(
                spec, f"got a batch of {shape[0]}, the model takes at most {self.max_batch_size}"
            )
        return shape

    def _mismatch(self, spec: TensorSpec, problem: str) -> HostError:
        expected = f"expected {spec.datatype} {list(spec.shape)}"
        return invalid_argument(
            f"input '{spec.name}' of model '{self.model}': {expected}, {problem}"
        )

    def check_outputs(self, names: Sequence[str]) -> None:
        """Raises HostError INVALID_ARG for an output that the model does not have."""
        for name in names:
            if name not in self.outputs:
                raise invalid_argument(
                    f"model '{self.model}' has no output '{name}'; {_list('outputs', self.outputs)}"
                )

    def output_byte_size(self, name: str, inputs: Sequence[EncodedTensor]) -> int:
        """Size of an output in bytes if the inputs determine it, otherwise 0."""
        spec = self.outputs[name]
        shape = spec.shape
        if self.max_batch_size and shape and inputs and inputs[0].shape:
            shape = (inputs[0].shape[0], *shape[1:])
        if not shape or min(shape) < 0:
            return 0
        return math.prod(shape) * SIZES.get(spec.datatype, 0)


def _list(what: str, specs: Mapping[str, TensorSpec]) -> str:
    known = ", ".join(map(str, specs.values()))
    return f"its {what} are {known}" if known else f"it declares no {what}"


def _to_array(value: Value, spec: TensorSpec) -> tuple[npt.NDArray[Any], bool]:
    """Returns a value as an array, and whether it was one. Raises ValueError and TypeError."""
    if spec.datatype not in CODES:
        raise ValueError("which this client does not know")
    exact = isinstance(value, (np.ndarray, np.generic)) or hasattr(value, "__array__")
    if spec.datatype == "BYTES":
        return _to_texts(value), exact
    if not exact:
        return _from_lists(value, spec), False
    array = np.asarray(value)
    code = code_of(array.dtype)
    if spec.datatype == "BF16":
        if array.dtype == np.float32:
            return _to_bfloat16_bits(array).reshape(array.shape), True
        if code == BF16:
            return array, True
    elif NAMES.get(code) == spec.datatype:
        return array, True
    got = NAMES[code] if code else str(array.dtype)
    raise ValueError(f"got {got} {list(array.shape)}: convert it with .astype()")


def _to_texts(value: Value) -> npt.NDArray[Any]:
    """Returns an object array of bytes."""
    array = np.array(value, dtype=np.object_) if not isinstance(value, np.ndarray) else value
    elements = []
    for element in array.ravel().tolist():
        if isinstance(element, str):
            element = element.encode()
        elif not isinstance(element, bytes):
            raise TypeError(f"got an element of type {type(element).__name__}, not str or bytes")
        elements.append(element)
    texts = np.empty(len(elements), dtype=np.object_)
    texts[:] = elements
    return texts.reshape(array.shape)


def _from_lists(value: Value, spec: TensorSpec) -> npt.NDArray[Any]:
    """Returns numbers in lists as the data type has them; it rounds floating-point numbers."""
    try:
        array = np.array(value)
    except ValueError:  # the text of numpy is about arrays
        raise ValueError("got lists that differ in length") from None
    dtype = np.dtype(np.float32) if spec.datatype == "BF16" else spec.dtype
    if dtype.kind in "iu" and array.dtype.kind in "fO":
        # NumPy has no type for -1 and 2**63, and takes float64 for 1 and 2**63.
        array = np.array(value, dtype=np.object_)
        if not all(isinstance(number, int) for number in array.flat):
            raise ValueError(f"got {_abbreviate(value)}")
    elif array.size and array.dtype.kind not in _KINDS[dtype.kind]:
        raise ValueError(f"got {_abbreviate(value)}")
    if array.size and dtype.kind in "iu":
        limits = np.iinfo(dtype.name)
        if int(array.min()) < limits.min or int(array.max()) > limits.max:
            raise ValueError(f"got a number outside {limits.min} to {limits.max}")
    if dtype.kind == "f":
        return _round(array, dtype, spec.datatype)
    return array.astype(dtype)


def _round(numbers: npt.NDArray[Any], dtype: np.dtype[Any], datatype: str) -> npt.NDArray[Any]:
    """Returns floating-point numbers of a data type. Raises ValueError for those too large."""
    with np.errstate(over="ignore"):
        rounded = numbers.astype(dtype)
    infinite = np.isinf(rounded)
    largest = float(np.finfo(dtype.name).max)
    if datatype == "BF16":
        rounded = _to_bfloat16_bits(rounded).reshape(numbers.shape)
        infinite = (rounded & 0x7FFF) == _BF16_INFINITY
        largest = _BF16_MAX
    if (infinite & np.isfinite(numbers)).any():
        raise ValueError(f"got a number outside -{largest:g} to {largest:g}")
    return rounded


def _abbreviate(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def encode_values(spec: TensorSpec, value: Value) -> bytes:
    """Returns the content of a tensor. Raises ValueError and TypeError for values that differ."""
    array, _ = _to_array(value, spec)
    return encode(array) if spec.datatype == "BYTES" else array.tobytes()


def encode_tensor(tensor: Tensor) -> EncodedTensor:
    """Returns a tensor as an input."""
    name, datatype = tensor.name(), NAMES[tensor.triton_dtype()]
    return EncodedTensor(name, datatype, tuple(tensor.shape()), bytes(tensor._wire_data()))


def to_tensor(name: str, datatype: str, shape: Sequence[int], content: Any) -> Tensor:
    """Returns a received tensor. Raises HostError if its content does not fit its shape."""
    code = _check_content(name, datatype, shape, content)
    return Tensor._from_wire(name, code, list(shape), memoryview(content), None)


def decode(name: str, datatype: str, shape: Sequence[int], content: Any) -> npt.NDArray[Any]:
    """Returns a received tensor as an array with memory of its own.

    Raises HostError if its content does not fit its shape.
    """
    code = _check_content(name, datatype, shape, content)
    if code not in (BYTES, BF16):
        array: npt.NDArray[Any] = np.frombuffer(content, STORAGE[code]).reshape(shape).copy()
        return array
    tensor = Tensor._from_wire(name, code, list(shape), memoryview(content), None)
    try:
        return tensor.as_bfloat16() if code == BF16 else tensor.as_numpy()
    except ValueError as error:
        raise internal(f"the server sent an invalid output '{name}': {error}") from error


def _check_content(name: str, datatype: str, shape: Sequence[int], content: Any) -> int:
    """Returns the code of the data type. Raises HostError if the content does not fit the shape."""
    code = CODES.get(datatype, 0)
    size = math.prod(shape) * SIZES.get(datatype, 0)
    if not code or (code != BYTES and size != len(content)):
        shown = f"{len(content)} bytes for {datatype} {list(shape)}"
        raise internal(f"the server sent an invalid output '{name}': {shown}")
    return code
