"""Decodes header blocks compressed with HPACK (RFC 7541)."""

from __future__ import annotations

from collections import deque

from host.frontends.grpc.h2.huffman import BITS, decode_huffman
from host.lane import header_reader

Field = tuple[bytes, bytes]

_DEFAULT_TABLE_SIZE = 4096  # bytes; the server announces no other
_FIELD_OVERHEAD = 32  # bytes that each field counts besides its name and value
_MAX_INTEGER_BYTES = 5  # after the prefix
_TRUNCATED = "truncated"

_STATIC_TABLE: tuple[Field, ...] = tuple(
    (name, value)
    for name, *values in (
        (b"", b""),  # index 0, which no field may have
        (b":authority", b""),
        (b":method", b"GET", b"POST"),
        (b":path", b"/", b"/index.html"),
        (b":scheme", b"http", b"https"),
        (b":status", b"200", b"204", b"206", b"304", b"400", b"404", b"500"),
        (b"accept-charset", b""),
        (b"accept-encoding", b"gzip, deflate"),
        *(
            (name, b"")
            for name in (
                b"accept-language accept-ranges accept access-control-allow-origin age allow "
                b"authorization cache-control content-disposition content-encoding "
                b"content-language content-length content-location content-range content-type "
                b"cookie date etag expect expires from host if-match if-modified-since "
                b"if-none-match if-range if-unmodified-since last-modified link location "
                b"max-forwards proxy-authenticate proxy-authorization range referer refresh "
                b"retry-after server set-cookie strict-transport-security transfer-encoding "
                b"user-agent vary via www-authenticate"
            ).split()
        ),
    )
    for value in values
)
_FIRST_DYNAMIC = len(_STATIC_TABLE)

NAME_BYTES = b"!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyz"
"""The bytes of names of fields (RFC 9113 section 8.2.1)."""

CONNECTION_SPECIFIC = frozenset(
    (b"connection", b"proxy-connection", b"keep-alive", b"transfer-encoding", b"upgrade")
)
"""The fields that HTTP/2 does not have (RFC 9113 section 8.2.2)."""

_lane = None
if header_reader is not None:
    _with_rules = CONNECTION_SPECIFIC | {b"content-length"}
    _lane = header_reader(_STATIC_TABLE, BITS, NAME_BYTES, _with_rules)


class HpackDecoder:
    """Decodes the header blocks of one connection, in the order in which they arrive.

    Attributes:
        table_changes: The number of changes of the dynamic table so far. A block that changes
            nothing means the same until the next change.
    """

    def __init__(self, max_list_size: int) -> None:
        """`max_list_size`: the largest header list in bytes (RFC 9113 section 6.5.2)."""
        self.table_changes = 0
        self._max_list_size = max_list_size
        self._dynamic: deque[Field] = deque()  # the newest first
        self._size = 0
        self._max_size = _DEFAULT_TABLE_SIZE

    def decode(self, block: bytes) -> tuple[list[Field], int, bool]:
        """Returns the fields, the size of their list in bytes, and whether the request is usual.

        A usual request is known to keep the rules about its fields; others are to be checked.
        Raises ValueError if the block cannot be decoded or the list is too large; the decoder is
        unusable after that.
        """
        if _lane is not None:
            room = self._max_size - self._size
            decoded = _lane.decode_block(block, self._dynamic, room, self._max_list_size)
            if decoded is not None:
                fields, list_size, added, usual = decoded
                for field in added:
                    self._add(field)
                return fields, list_size, usual
        fields, list_size = self._decode(block)
        return fields, list_size, False

    def _decode(self, block: bytes) -> tuple[list[Field], int]:
        fields: list[Field] = []
        append, dynamic = fields.append, self._dynamic
        position, end = 0, len(block)
        try:
            while position < end:
                first = block[position]
                position += 1
                if first & 0x80:  # a field of a table
                    index = first & 0x7F
                    if index == 0x7F:
                        index, position = _long_integer(block, position, 0x7F)
                    if index < _FIRST_DYNAMIC:
                        if not index:
                            raise ValueError("field with index 0")
                        append(_STATIC_TABLE[index])
                    else:
                        append(dynamic[index - _FIRST_DYNAMIC])
                    continue
                if first & 0x60 == 0x20:
                    if fields:
                        raise ValueError("table size after the first field")
                    size = first & 0x1F
                    if size == 0x1F:
                        size, position = _long_integer(block, position, 0x1F)
                    self._change_max_size(size)
                    continue
                # A literal field: its name is in a table, or follows.
                most = 0x3F if first & 0x40 else 0x0F
                index = first & most
                if index:
                    if index == most:
                        index, position = _long_integer(block, position, most)
                    name = (
                        _STATIC_TABLE[index]
                        if index < _FIRST_DYNAMIC
                        else dynamic[index - _FIRST_DYNAMIC]
                    )[0]
                else:
                    length = block[position]
                    if length < 0x7F:  # short, and without Huffman coding
                        position += 1
                        name = block[position : position + length]
                        position += length
                    else:
                        name, position = _coded_string(block, position)
                length = block[position]
                if length < 0x7F:
                    position += 1
                    value = block[position : position + length]
                    position += length
                else:
                    value, position = _coded_string(block, position)
                if position > end:
                    raise ValueError(_TRUNCATED)
                field = name, value
                append(field)
                if first & 0x40:
                    self._add(field)
        except IndexError:
            raise ValueError("truncated, or an index beyond the table") from None
        list_size = _FIELD_OVERHEAD * len(fields)
        for name, value in fields:
            list_size += len(name) + len(value)
        if list_size > self._max_list_size:
            raise ValueError(f"list of more than {self._max_list_size} bytes")
        return fields, list_size

    def _add(self, field: Field) -> None:
        """Adds a field to the dynamic table, and drops the oldest ones that have no room."""
        self.table_changes += 1
        self._size += len(field[0]) + len(field[1]) + _FIELD_OVERHEAD
        self._dynamic.appendleft(field)
        if self._size > self._max_size:
            self._drop_oldest()  # all, if it is larger than the table

    def _change_max_size(self, size: int) -> None:
        if size > _DEFAULT_TABLE_SIZE:
            raise ValueError(f"table of {size} bytes, the limit is {_DEFAULT_TABLE_SIZE}")
        self.table_changes += 1
        self._max_size = size
        self._drop_oldest()

    def _drop_oldest(self) -> None:
        while self._size > self._max_size:
            name, value = self._dynamic.pop()
            self._size -= len(name) + len(value) + _FIELD_OVERHEAD


def _long_integer(block: bytes, position: int, prefix: int) -> tuple[int, int]:
    """Reads the rest of an integer whose prefix is full. Raises ValueError or IndexError."""
    for shift in range(0, 7 * _MAX_INTEGER_BYTES, 7):
        byte = block[position]
        position += 1
        prefix += (byte & 0x7F) << shift
        if byte < 0x80:
            return prefix, position
    raise ValueError(f"integer of more than {_MAX_INTEGER_BYTES} bytes")


def _coded_string(block: bytes, position: int) -> tuple[bytes, int]:
    """Reads a string that is long or has Huffman coding. Raises ValueError or IndexError."""
    first = block[position]
    position += 1
    length = first & 0x7F
    if length == 0x7F:
        length, position = _long_integer(block, position, 0x7F)
    stop = position + length
    if stop > len(block):
        raise ValueError(_TRUNCATED)
    data = block[position:stop]
    return decode_huffman(data) if first & 0x80 else data, stop
