from collections.abc import Container, Iterable, Sequence

from host.inference.request import InferRequest

Field = tuple[bytes, bytes]

class HeaderReader:
    def __init__(
        self,
        static_table: tuple[Field, ...],
        huffman_bits: Iterable[int],
        name_bytes: Container[int],
        with_rules: frozenset[bytes],
    ) -> None: ...
    def decode_block(
        self, block: bytes, dynamic: Sequence[Field], free: int, max_list_size: int
    ) -> tuple[list[Field], int, list[Field], bool] | None: ...

class MessageReader:
    def __init__(
        self, request_class: object, tensor_class: object, min_view_bytes: int
    ) -> None: ...
    def parse_request(self, data: bytes) -> InferRequest | None: ...

def write_record(memory: memoryview, written: int, frame: bytes) -> int: ...
def read_record(memory: memoryview, read: int, limit: int) -> bytes | None: ...
