from collections.abc import Container, Iterable, Sequence

from host.inference.request import InferRequest, RequestShape

Field = tuple[bytes, bytes]
RequestFrames = tuple[int, int, bytes, bytes, int, int, int]
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

class ResponseWriter:
    def __init__(self, headers: bytes, trailers: bytes) -> None: ...
    def encode(self, stream: int, message: bytes) -> bytes: ...

def write_record(memory: memoryview, written: int, frame: bytes) -> int: ...
def read_record(memory: memoryview, read: int, limit: int) -> bytes | None: ...
