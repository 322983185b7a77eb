"""The text form of tensors: of inputs on the command line, and of responses at a terminal."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING, Any, Dict, List, Mapping, Sequence, Tuple, Union

import numpy as np

from pb_utils._datatypes import BF16, NAMES, triton_string_to_numpy
from pb_utils._model_code import declared_shape
from pb_utils._tensor import Tensor

if TYPE_CHECKING:
    import numpy.typing as npt

    from pb_utils._response import InferenceResponse


Value = Union["np.ndarray[Any, Any]", Tensor]


class InvalidInput(Exception):
    """A value that cannot be an input; the text names the input and what it expects."""


def read_inputs(given: Sequence[Tuple[str, str]], config: Mapping[str, Any]) -> Dict[str, Value]:
    """Returns the inputs of a model from pairs (name, VALUE).

    `config` is the model's configuration, parsed. Raises InvalidInput.
    """
    wanted = {
        entry["name"]: _InputReader(entry, config["max_batch_size"]) for entry in config["input"]
    }
    texts: Dict[str, str] = {}
    for name, text in given:
        if name not in wanted:
            if not wanted:
                raise InvalidInput(
                    f"the model has no input '{name}', as it declares none: add its inputs to"
                    " config.pbtxt, or to auto_complete_config in model.py"
                )
            known = "\n".join(f"  {reader}" for reader in wanted.values())
            raise InvalidInput(f"the model has no input '{name}'; its inputs are\n{known}")
        if name in texts:
            raise InvalidInput(f"input '{name}' is given twice")
        texts[name] = text
    missing = [
        reader for name, reader in wanted.items() if name not in texts and not reader.optional
    ]
    if missing:
        lines = "\n".join(f"  --input {reader.name}=VALUE  for {reader}" for reader in missing)
        raise InvalidInput(f"the model requires more inputs:\n{lines}\nVALUE may be 'random'")
    return {name: wanted[name].parse(text) for name, text in texts.items()}


class _InputReader:
    """Converts a text into one input of the configuration."""

    def __init__(self, entry: Mapping[str, Any], max_batch_size: int) -> None:
        self.name: str = entry["name"]
        self.optional = bool(entry.get("optional"))
        self._type: str = entry["data_type"]
        self._max_batch_size = max_batch_size
        self._shape = declared_shape(entry, max_batch_size)

    def __str__(self) -> str:
        batch = (
            f" (the first is the batch, at most {self._max_batch_size})"
            if self._max_batch_size > 0
            else ""
        )
        return f"{self.name} {self._type} {self._shape}{batch}"

    def parse(self, text: str) -> Value:
        """Returns the input. Raises InvalidInput."""
        try:
            array = self._with_full_shape(self._parse_array(text))
        except (ValueError, OSError, OverflowError) as problem:
            raise InvalidInput(f"input {self}: {problem}") from problem
        if self._type == "TYPE_BF16":
            data = memoryview(_to_bfloat16_bits(array).tobytes())
            return Tensor._from_wire(self.name, BF16, list(array.shape), data, None)
        return array

    def _parse_array(self, text: str) -> np.ndarray[Any, Any]:
        if text == "random":
            return self._random_array()
        if text.startswith("@"):
            path = text[1:]
            if path.endswith(".npy"):
                return self._load_npy(path)
            if not path.endswith(".json"):
                return self._read_bytes(path)
            with open(path, encoding="utf-8") as file:
                text = file.read()
        try:
            value = json.loads(text)
        except ValueError as error:
            if self._type != "TYPE_STRING":
                raise ValueError(
                    f"{_abbreviate(text)} is not JSON ({error}), nor 'random'"
                ) from None
            value = text
        return self._convert_json(value)

    def _convert_json(self, value: Any) -> np.ndarray[Any, Any]:
        """Returns the array of a JSON value.

        Raises ValueError for values that the data type cannot represent; it does not round them.
        """
        if self._type == "TYPE_STRING":
            array = _object_array_from_lists(value)
            texts = [text for text in array.flat if not isinstance(text, str)]
            if texts:
                raise ValueError(f"expected texts, got {_abbreviate(texts[0])}")
            return _object_array(
                [text.encode(errors="surrogatepass") for text in array.flat], array.shape
            )
        dtype = self._dtype
        array = np.array(value)
        allowed = {"b": "b", "i": "iu", "u": "iu", "f": "iuf"}[dtype.kind]
        if array.size and array.dtype.kind not in allowed:
            raise ValueError(f"expected {_KINDS[dtype.kind]}, got {_abbreviate(value)}")
        if array.size and dtype.kind in "iu":
            limits = np.iinfo(dtype)
            if int(array.min()) < limits.min or int(array.max()) > limits.max:
                raise ValueError(f"expected numbers from {limits.min} to {limits.max}")
        return array.astype(dtype)

    def _read_bytes(self, path: str) -> np.ndarray[Any, Any]:
        """Returns one element, the bytes of the file. Raises ValueError for other data types."""
        if self._type != "TYPE_STRING":
            raise ValueError(f"'{path}' must end in .npy or .json")
        with open(path, "rb") as file:
            return _object_array([file.read()], ())

    def _load_npy(self, path: str) -> np.ndarray[Any, Any]:
        array: np.ndarray[Any, Any] = np.load(path, allow_pickle=False)
        if self._type == "TYPE_STRING":
            if array.dtype.kind not in "SU":
                raise ValueError(f"expected an array of texts, '{path}' holds {array.dtype}")
            encoded = np.char.encode(array, "utf-8") if array.dtype.kind == "U" else array
            return encoded.astype(np.object_)
        if array.dtype != self._dtype:
            raise ValueError(f"expected {self._dtype}, '{path}' holds {array.dtype}: convert it")
        return array

    def _random_array(self) -> np.ndarray[Any, Any]:
        shape = [1 if size < 0 else size for size in self._shape]
        random = np.random.default_rng(0)
        if self._type == "TYPE_STRING":
            return _object_array([b"text %d" % number for number in range(math.prod(shape))], shape)
        dtype = self._dtype
        if dtype.kind == "f":
            return random.random(shape).astype(dtype)
        return random.integers(0, 2 if dtype.kind == "b" else 10, shape).astype(dtype)

    @property
    def _dtype(self) -> np.dtype[Any]:
        """The numpy type of the input; float32 for BF16."""
        if self._type == "TYPE_BF16":
            return np.dtype(np.float32)
        return np.dtype(triton_string_to_numpy(self._type))

    def _with_full_shape(self, array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """Adds the batch dimension, and the dimensions of a single number, where they are missing.

        Raises ValueError if the shape does not match.
        """
        wanted = self._shape
        shape = list(array.shape)
        if not shape and wanted:
            shape = [1] * len(wanted)
        elif self._max_batch_size > 0 and len(shape) == len(wanted) - 1:
            shape = [1, *shape]
        fits = len(shape) == len(wanted) and all(
            size in (-1, given) for size, given in zip(wanted, shape)
        )
        if not fits or (self._max_batch_size > 0 and shape[0] > self._max_batch_size):
            raise ValueError(f"expected that shape, got {list(array.shape)}")
        return array.reshape(shape)


_KINDS = {"b": "true or false", "i": "whole numbers", "u": "whole numbers", "f": "numbers"}


def _object_array_from_lists(value: Any) -> np.ndarray[Any, Any]:
    """Returns an object array of nested lists. Raises ValueError if their lengths differ."""
    shape: List[int] = []
    level = [value]
    while all(isinstance(element, list) for element in level) and level:
        sizes = {len(element) for element in level}
        if len(sizes) != 1:
            raise ValueError("its lists differ in length")
        shape.append(sizes.pop())
        level = [part for element in level for part in element]
    return _object_array(level, shape)


def _object_array(elements: Sequence[Any], shape: Sequence[int]) -> np.ndarray[Any, Any]:
    """Returns an object array, filled one by one.

    NumPy would strip zero bytes at the ends of texts, and unpack lists.
    """
    array = np.empty(len(elements), dtype=np.object_)
    for index, element in enumerate(elements):
        array[index] = element
    return array.reshape(tuple(shape))


def _to_bfloat16_bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Rounds 32-bit numbers to nearest, ties to even, and returns their upper halves; NaN stays
    NaN.
    """
    bits = np.frombuffer(array.tobytes(), np.uint32)
    half = np.uint32(16)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> half) & np.uint32(1))
    quiet = (bits >> half) | np.uint32(0x40)
    halves: np.ndarray[Any, Any] = np.where(np.isnan(array.ravel()), quiet, rounded >> half)
    return halves.astype(np.uint16)


def _abbreviate(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return repr(text) if len(text) <= 40 else repr(text[:37]) + "..."


_MAX_ELEMENTS = 64  # larger tensors are abbreviated


def format_response(number: int, response: InferenceResponse) -> str:
    """Returns lines with the parameters and the outputs of a response, without a last newline.

    Args:
        number: the position of the response in its stream, from 1.
        response: a response that is not an error.
    """
    parameters = response.parameters()
    suffix = f", parameters {parameters}" if parameters not in ("", "{}") else ""
    lines = [f"response {number}{suffix}"]
    for tensor in response.output_tensors():
        lines.append(f"  {tensor.name()} {NAMES[tensor.triton_dtype()]} {tensor.shape()}")
        lines += [f"    {line}" for line in format_tensor(tensor).split("\n")]
    return "\n".join(lines)


def format_tensor(tensor: Tensor, longest: int | None = None) -> str:
    """Returns the elements of a tensor, abbreviated if there are many.

    Args:
        tensor: a tensor in the memory of the host.
        longest: characters after which an element of BYTES is cut; None for all of them.
    """
    array = _readable_array(tensor, longest)
    return np.array2string(array, threshold=_MAX_ELEMENTS, separator=", ")


def _readable_array(tensor: Tensor, longest: int | None) -> npt.NDArray[Any]:
    """Returns an array to print: BYTES as text, BF16 as 32-bit numbers."""
    if tensor.triton_dtype() == BF16:
        halves = np.frombuffer(tensor._wire_data(), np.uint16).astype(np.uint32)
        wide: npt.NDArray[Any] = (halves << np.uint32(16)).view(np.float32)
        return wide.reshape(tensor.shape())
    array = tensor.as_numpy()
    if array.dtype != np.object_:
        return array
    texts = np.empty(array.size, dtype=np.object_)
    for index, element in enumerate(array.flat):
        try:
            text = element.decode()
        except UnicodeDecodeError:
            text = element
        texts[index] = text[:longest]
    return texts.reshape(array.shape)
