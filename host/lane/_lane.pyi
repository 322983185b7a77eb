from collections.abc import Callable, Container, Iterable, Sequence
from typing import Any

from host.inference.request import (
    ExecutionTimes,
    InferRequest,
    InferResponse,
    RequestShape,
    Tensor,
)

SOURCES: str

Field = tuple[bytes, bytes]
RequestFrames = tuple[int, int, bytes, bytes, int, int, int]
StreamMessages = tuple[int, int, list[tuple[int, bytes, None]], int]
EncodeResponse = Callable[[InferResponse, dict[tuple[Any, ...], bytes], bytes | None], bytes | None]
UsualRequest = tuple[tuple[Field, ...], float | None]

class HeaderReader:
    def __init__(
        self,
        static_table: tuple[Field, ...],
        huffman_bits: Iterable[int],
        name_bytes: Container[int],
        with_rules: frozenset[bytes],
        interpreted: frozenset[bytes],
        units: dict[int, float],
    ) -> None: ...
    def decode_block(
        self, block: bytes, dynamic: Sequence[Field], free: int, max_list_size: int
    ) -> tuple[list[Field], int, list[Field], UsualRequest | None] | None: ...

class MessageReader:
    def __init__(
        self, request_class: object, tensor_class: object, min_view_bytes: int
    ) -> None: ...
    def parse_request(
        self, data: bytes, shapes: dict[bytes, RequestShape]
    ) -> InferRequest | None: ...

def read_request(data: bytes, position: int, max_frame: int) -> RequestFrames | None: ...
def read_messages(data: bytes, position: int, max_frame: int) -> StreamMessages | None: ...
def encode_message(head: bytes, tail: bytes, stream: int, message: bytes) -> bytes: ...

encode_response: EncodeResponse

class ResultsReader:
    def __init__(
        self, tensor_class: object, times_class: object, names: dict[int, str]
    ) -> None: ...
    def decode_results(
        self, frame: bytes
    ) -> tuple[int, list[list[Tensor]], ExecutionTimes] | None: ...

def write_record(memory: memoryview, written: int, frame: bytes) -> int: ...
def read_record(memory: memoryview, read: int, limit: int) -> bytes | None: ...
