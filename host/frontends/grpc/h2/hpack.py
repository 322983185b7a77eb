"""Decodes header blocks compressed with HPACK (RFC 7541)."""

from __future__ import annotations

from collections import deque

from host.frontends.grpc.h2.grpc_messages import INTERPRETED_FIELDS, TIMEOUT_UNITS
from host.lane import header_reader

# The code is canonical: codes of one length are consecutive numbers, in the order of their symbols.
# So the number of bits of each symbol defines it; the last symbol is the end of the string.
BITS = (
    *(13, 23, 28, 28, 28, 28, 28, 28, 28, 24, 30, 28, 28, 30, 28, 28),
    *(28, 28, 28, 28, 28, 28, 30, 28, 28, 28, 28, 28, 28, 28, 28, 28),
    *(6, 10, 10, 12, 13, 6, 8, 11, 10, 10, 8, 11, 8, 6, 6, 6),
    *(5, 5, 5, 6, 6, 6, 6, 6, 6, 6, 7, 8, 15, 6, 12, 10),
    *(13, 6, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7, 7),
    *(7, 7, 7, 7, 7, 7, 7, 7, 8, 7, 8, 13, 19, 13, 14, 6),
    *(15, 5, 6, 5, 6, 5, 6, 6, 6, 5, 7, 7, 6, 6, 6, 5),
    *(6, 7, 6, 5, 5, 6, 7, 7, 7, 7, 7, 15, 11, 14, 13, 28),
    *(20, 22, 20, 20, 22, 22, 22, 23, 22, 23, 23, 23, 23, 23, 24, 23),
    *(24, 24, 22, 23, 24, 23, 23, 23, 23, 21, 22, 23, 22, 23, 23, 24),
    *(22, 21, 20, 22, 22, 23, 23, 21, 23, 22, 22, 24, 21, 22, 23, 23),
    *(21, 21, 22, 21, 23, 22, 23, 23, 20, 22, 22, 22, 23, 22, 22, 23),
    *(26, 26, 20, 19, 22, 23, 22, 25, 26, 26, 26, 27, 27, 26, 24, 25),
    *(19, 21, 26, 27, 27, 26, 27, 24, 21, 21, 26, 26, 28, 27, 27, 27),
    *(20, 24, 20, 21, 22, 21, 21, 23, 22, 22, 25, 25, 24, 24, 26, 23),
    *(26, 27, 26, 26, 27, 27, 27, 27, 27, 28, 27, 27, 27, 27, 27, 26),
    30,
)
"""The number of bits of each symbol."""

_END_OF_STRING = 256
_MAX_PADDING = 7  # bits, all 1


class _Prefix(dict[int, "tuple[_Prefix, bytes]"]):
    """The bits of an incomplete code: maps the next byte to the bits left and the symbols before.

    Bytes are added when they first occur: all of them would take 65,536 entries.
    """

    __slots__ = ("bits", "ends")

    def __init__(self, bits: str) -> None:
        super().__init__()
        self.bits = bits
        self.ends = len(bits) <= _MAX_PADDING and "0" not in bits  # a string may end here

    def __missing__(self, byte: int) -> tuple[_Prefix, bytes]:
        """Raises ValueError if the byte completes the code that must not occur."""
        bits, symbols = self.bits, bytearray()
        for bit in f"{byte:08b}":
            bits += bit
            symbol = _SYMBOLS.get(bits)
            if symbol is not None:
                if symbol == _END_OF_STRING:
                    raise ValueError("Huffman code of the end of the string inside of a string")
                symbols.append(symbol)
                bits = ""
        after = _PREFIXES.setdefault(bits, _Prefix(bits))
        found = self[byte] = after, bytes(symbols)
        return found


def _make_symbols() -> dict[str, int]:
    """Symbols by the bits of their code."""
    symbols, code, before = {}, 0, 0
    for bits, symbol in sorted((bits, symbol) for symbol, bits in enumerate(BITS)):
        code <<= bits - before
        symbols[f"{code:0{bits}b}"] = symbol
        code, before = code + 1, bits
    return symbols


_SYMBOLS = _make_symbols()
_PREFIXES = {"": _Prefix("")}  # by their bits; there are 256
_START = _PREFIXES[""]


def decode_huffman(data: bytes) -> bytes:
    """Returns the string. Raises ValueError if the code is wrong."""
    prefix = _START
    parts = []
    for byte in data:
        prefix, symbols = prefix[byte]
        parts.append(symbols)
    if not prefix.ends:
        raise ValueError("Huffman code that ends within a symbol")
    return b"".join(parts)


Field = tuple[bytes, bytes]

UsualRequest = tuple[tuple[Field, ...], float | None]
"""The fields of a request that are in INTERPRETED_FIELDS, and its timeout in seconds."""

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
    _units = {ord(unit): seconds for unit, seconds in TIMEOUT_UNITS.items()}
    _lane = header_reader(_STATIC_TABLE, BITS, NAME_BYTES, _with_rules, INTERPRETED_FIELDS, _units)


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

    def decode(self, block: bytes) -> tuple[list[Field], int, UsualRequest | None]:
        """Returns the fields, the size of their list in bytes, and what is in a usual request.

        A usual request is known to keep the rules about its fields, has no content-length and no
        binary metadata; others are to be checked.
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
        return fields, list_size, None

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
