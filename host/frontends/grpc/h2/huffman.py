"""Decodes the Huffman code of HPACK (RFC 7541 section 5.2 and appendix B)."""

from __future__ import annotations

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
