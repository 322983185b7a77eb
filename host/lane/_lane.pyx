# cython: language_level=3, boundscheck=True, wraparound=False, initializedcheck=True
# cython: embedsignature=False, binding=False
"""Reads what is whole and usual in compiled code; returns None for all else, which Python reads.

The rules are those of the Python code that a class names; no rule is here only. The classes keep
nothing of what they read, and raise nothing for the bytes of clients. Each read of a byte is
checked against the end of its object.
"""

import array

cimport cython
from cpython.buffer cimport PyBUF_SIMPLE, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize, PyBytes_GET_SIZE
from cpython.unicode cimport PyUnicode_DecodeUTF8
from libc.stdint cimport int64_t, uint32_t, uint64_t
from libc.string cimport memcmp, memcpy

cdef extern from *:
    const char* LANE_SOURCES

SOURCES = LANE_SOURCES.decode()
"""The digest of the sources that this was built from."""

cdef enum:
    MAX_FIELDS = 64  # of a header, or of a message
    MAX_STRING = 8192  # bytes of a header
    LONGEST_CODE = 30  # bits
    LAST_BYTE = 255
    MAX_MESSAGE = 1 << 20  # bytes
    MAX_TEXT = 128  # bytes of a correlation id
    MAX_DESCRIPTION = 1024  # bytes of a request before its tensors; the shapes of others are not kept


cdef class HeaderReader:
    """Decodes header blocks: `HpackDecoder` with `_check_request` of host.frontends.grpc.h2."""

    cdef tuple static_table
    cdef frozenset with_rules, interpreted
    cdef dict units
    cdef bytes name_bytes
    cdef int[::1] first_code, codes, offsets, symbols

    def __init__(
        self,
        tuple static_table,
        tuple huffman_bits,
        name_bytes,
        frozenset with_rules,
        frozenset interpreted,
        dict units,
    ):
        """`huffman_bits`: the length of the code of each symbol.

        `name_bytes` are valid in a name. Fields with names of `with_rules` are not usual, those of
        `interpreted` say how to handle the request. `units`: seconds by the units of timeouts.
        """
        cdef uint32_t code = 0, length, offset = 0
        self.static_table = static_table
        self.name_bytes = bytes(1 if byte in name_bytes else 0 for byte in range(256))
        self.with_rules = with_rules
        self.interpreted = interpreted
        self.units = units
        ordered = sorted((bits, symbol) for symbol, bits in enumerate(huffman_bits))
        self.symbols = array.array("i", [symbol for _, symbol in ordered])
        counts = [huffman_bits.count(length) for length in range(LONGEST_CODE + 1)]
        firsts, offsets = [], []
        for count in counts:
            firsts.append(code)
            offsets.append(offset)
            code = (code + count) << 1
            offset += count
        self.first_code = array.array("i", firsts)
        self.codes = array.array("i", counts)
        self.offsets = array.array("i", offsets)

    def decode_block(
        self, bytes block not None, dynamic not None, Py_ssize_t free, Py_ssize_t max_list_size
    ):
        """Decodes a header block: the fields, their size, those to add, and the usual request.

        That is None or the interpreted fields and the timeout in seconds, as `usual_request` says.
        `dynamic`: the fields of the dynamic table. `free`: bytes that it has room for.
        """
        cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(block), index, known = len(dynamic)
        cdef Py_ssize_t first_dynamic = len(self.static_table), count = 0, pending = 0
        cdef Py_ssize_t size = 0, field_size
        cdef int first, most
        cdef bint named
        cdef list fields = [], added = []
        cdef bytes name, value
        cdef tuple field, oldest
        while position < end:
            first = <unsigned char>block[position]
            position += 1
            if first & 0x60 == 0x20 and not first & 0x80:
                return None  # another size of the table
            most = 0x7F if first & 0x80 else 0x3F if first & 0x40 else 0x0F
            index = first & most
            if index == most:
                index = self.integer(block, &position, end, most)
            elif not index and first & 0x80:
                return None
            if index < 0:
                return None
            named = index > 0
            if named:
                if index < first_dynamic:
                    field = self.static_table[index]
                else:
                    index -= first_dynamic
                    if index < pending:
                        field = added[pending - 1 - index]
                    elif index - pending < known:
                        field = dynamic[index - pending]
                    else:
                        return None
            if not first & 0x80:
                name = field[0] if named else self.string(block, &position, end)
                value = self.string(block, &position, end)
                if name is None or value is None:
                    return None
                field = (name, value)
            fields.append(field)
            count += 1
            name = field[0]
            value = field[1]
            field_size = PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value) + 32
            size += field_size
            if size > max_list_size or count > MAX_FIELDS:
                return None
            if first & 0xC0 == 0x40:
                added.append(field)
                pending += 1
                free -= field_size
                while free < 0:  # the oldest fields go
                    known -= 1
                    if known < 0:
                        return None
                    oldest = dynamic[known]
                    name = oldest[0]
                    value = oldest[1]
                    free += PyBytes_GET_SIZE(name) + PyBytes_GET_SIZE(value) + 32
        return fields, size, added, self.usual_request(fields)

    cdef Py_ssize_t integer(
        self, bytes data, Py_ssize_t* position, Py_ssize_t end, Py_ssize_t value
    ):
        """The rest of an integer of HPACK whose prefix is full; -1 if it is long."""
        cdef Py_ssize_t start = position[0]
        cdef int64_t rest = read_varint(data, position, end)
        return -1 if rest < 0 or position[0] - start > 3 else value + <Py_ssize_t>rest

    cdef bytes string(self, bytes data, Py_ssize_t* position, Py_ssize_t end):
        """A string of HPACK, or None."""
        cdef Py_ssize_t length, start
        cdef int first
        if position[0] >= end:
            return None
        first = <unsigned char>data[position[0]]
        position[0] += 1
        length = first & 0x7F
        if length == 0x7F:
            length = self.integer(data, position, end, length)
        if length < 0 or length > MAX_STRING or length > end - position[0]:
            return None
        start = position[0]
        position[0] += length
        return self.huffman(data, start, start + length) if first & 0x80 else data[start : start + length]

    cdef bytes huffman(self, bytes data, Py_ssize_t start, Py_ssize_t end):
        """A string in Huffman code, or None."""
        cdef bytearray out = bytearray((end - start) * 8 // 5 + 1)
        cdef Py_ssize_t position, size = 0
        cdef int byte, bit, code = 0, length = 0, symbol
        for position in range(start, end):
            byte = <unsigned char>data[position]
            for bit in range(7, -1, -1):
                code = code << 1 | (byte >> bit & 1)
                length += 1
                if length > LONGEST_CODE:
                    return None
                if code - self.first_code[length] < self.codes[length]:
                    symbol = self.symbols[self.offsets[length] + code - self.first_code[length]]
                    if symbol > LAST_BYTE:
                        return None
                    out[size] = symbol
                    size += 1
                    code = length = 0
        if length > 7 or code != (1 << length) - 1:
            return None
        return bytes(out[:size])

    cdef tuple usual_request(self, list fields):
        """The interpreted fields and the timeout of a request that keeps the rules.

        None if it may break one, or has binary metadata.
        """
        cdef bytes name, value
        cdef tuple field
        cdef list interpreted = [], seen = []
        cdef object timeout = None, unit
        cdef int64_t number
        cdef bint ordinary = False
        cdef Py_ssize_t index
        cdef int byte
        for field in fields:
            name = field[0]
            value = field[1]
            if name in self.interpreted:
                interpreted.append(field)
            if not PyBytes_GET_SIZE(name):
                return None
            if <unsigned char>name[0] == 0x3A:  # a colon
                if ordinary or not PyBytes_GET_SIZE(value):
                    return None
                if name not in _PSEUDO_FIELDS or name in seen:
                    return None
                seen.append(name)
                continue
            ordinary = True
            for index in range(PyBytes_GET_SIZE(name)):
                if not self.name_bytes[<unsigned char>name[index]]:
                    return None
            for index in range(PyBytes_GET_SIZE(value)):
                byte = <unsigned char>value[index]
                if byte == 0 or byte == 13 or byte == 10:
                    return None
            if name == b"te":
                if value != b"trailers":
                    return None
            elif name == b"grpc-timeout":
                index = PyBytes_GET_SIZE(value) - 1
                number = read_digits(value, 0, index)
                unit = self.units.get(<unsigned char>value[index]) if number >= 0 else None
                if timeout is not None or unit is None:
                    return None
                timeout = number * unit
            elif name.endswith(b"-bin") and not name.startswith(b"grpc-"):
                return None
            elif name in self.with_rules:
                return None
        if len(seen) - (b":authority" in seen) < len(_PSEUDO_FIELDS) - 1:
            return None
        return tuple(interpreted), timeout


cdef class MessageReader:
    """Parses requests: `parse_infer_request` with `to_request` of host.frontends.grpc."""

    cdef object request_class, tensor_class
    cdef Py_ssize_t min_view_bytes

    def __init__(self, request_class, tensor_class, Py_ssize_t min_view_bytes):
        """`min_view_bytes`: the size of a message from which its tensors are views of it."""
        self.request_class = request_class
        self.tensor_class = tensor_class
        self.min_view_bytes = min_view_bytes

    def parse_request(self, bytes data not None, shapes not None):
        """Returns a ModelInferRequest with raw tensors as an InferRequest.

        `shapes` has the RequestShapes by the fields with them, if these are in the usual order.
        """
        try:
            return self.read_request(data, shapes)
        except UnicodeDecodeError:
            return None

    cdef read_request(self, bytes data, shapes):
        cdef Py_ssize_t position = 0, end = PyBytes_GET_SIZE(data), start, index, count = 0
        cdef int64_t version = -1
        cdef Py_ssize_t field, head_end = -1, tail_start = -1, tail_end = -1
        cdef int tag, last_tag = 0
        cdef bint ordered = True
        cdef bytes key
        cdef str model = None, request_id = None
        cdef list inputs = [], raw = [], outputs = [], made = []
        cdef bytes heads = b""  # of the contents but the first
        cdef Parameters parameters = Parameters.__new__(Parameters)
        parameters.others = {}
        parameters.correlation_id = 0
        if end < 2 or end > MAX_MESSAGE or <unsigned char>data[1] > 127:
            return None
        view = data if end < self.min_view_bytes else memoryview(data)
        while position < end:
            field = position
            tag = <unsigned char>data[position]
            position += 1
            start = read_length(data, &position, end)
            count += 1
            ordered = ordered and last_tag <= tag
            last_tag = tag
            if start < 0 or count > MAX_FIELDS or (model is None and tag != 0x0A):
                return None
            if tag == 0x0A and model is None:
                model = data[start:position].decode("utf-8")
            elif tag == 0x12 and version < 0:
                version = read_digits(data, start, position)
                if version < 0 or <unsigned char>data[start] == 0x30:
                    return None
            elif tag == 0x1A and request_id is None:
                request_id = data[start:position].decode("utf-8")
                head_end = field
            elif tag == 0x22:
                if head_end < 0:
                    head_end = field
                if not self.read_parameter(data, start, position, parameters):
                    return None
            elif tag == 0x2A:
                tensor = self.read_input(data, start, position)
                if tensor is None:
                    return None
                if not inputs:
                    tail_start = field
                inputs.append(tensor)
            elif tag == 0x32:
                index = start
                start = read_field(data, &index, position, 0x0A)
                if start < 0 or index != position:
                    return None  # with parameters, for one
                outputs.append(data[start:position].decode("utf-8"))
            elif tag == 0x3A:
                if not raw:
                    tail_end = start
                elif ordered:
                    heads += data[field:start]
                raw.append(view[start:position])
            else:
                return None
        if not inputs or len(inputs) != len(raw) or len(outputs) != len(set(outputs)):
            return None
        for index in range(len(inputs)):
            name, datatype, shape = <tuple>inputs[index]
            for other in made:
                if other.name == name:
                    return None
            made.append(self.tensor_class(name, datatype, shape, raw[index]))
        request = self.request_class(
            model,
            made,
            version,
            request_id or "",
            outputs,
            parameters.others,
            parameters.correlation_id,
            parameters.flags,
        )
        request.wants_empty_final = parameters.empty_final
        if ordered and tail_end <= MAX_DESCRIPTION:
            key = data[: tail_start if head_end < 0 else head_end] + data[tail_start:tail_end]
            request.shape = shapes[key + heads if heads else key]
        return request

    cdef tuple read_input(self, bytes data, Py_ssize_t position, Py_ssize_t end):
        """Name, datatype and shape of an input without parameters and contents, or None."""
        cdef str name = None, datatype = None
        cdef list shape = []
        cdef int tag
        cdef int64_t value
        cdef Py_ssize_t start
        while position < end:
            tag = <unsigned char>data[position]
            position += 1
            start = read_length(data, &position, end)
            if start < 0:
                return None
            if tag == 0x0A and name is None:
                name = data[start:position].decode("utf-8")
            elif tag == 0x12 and datatype is None:
                datatype = data[start:position].decode("utf-8")
            elif tag == 0x1A:
                while start < position:
                    value = read_varint(data, &start, position)
                    if value < 0 or len(shape) == MAX_FIELDS:
                        return None
                    shape.append(value)
            else:
                return None
        return (name or "", datatype or "", shape)

    cdef bint read_parameter(
        self, bytes data, Py_ssize_t position, Py_ssize_t end, Parameters parameters
    ):
        """Adds a parameter of a sequence, or one that no rule is about. Returns False for others."""
        cdef Py_ssize_t start, stop
        cdef str key
        cdef object value
        cdef int64_t number
        cdef int tag
        start = read_field(data, &position, end, 0x0A)
        if start < 0:
            return False
        key = data[start:position].decode("utf-8")
        start = read_field(data, &position, end, 0x12)
        if start < 0 or position != end or start == end:
            return False
        tag = <unsigned char>data[start]
        start += 1
        if tag == 0x1A:
            stop = start
            start = read_length(data, &stop, end)
            if start < 0 or stop != end:
                return False
            value = data[start:end].decode("utf-8")
        else:
            number = read_varint(data, &start, end)
            if number < 0 or start != end:
                return False
            if tag == 0x08 and number <= 1:
                value = number == 1
            elif tag == 0x10:
                value = number
            else:
                return False
        if key == "sequence_id":
            if tag == 0x08 or parameters.has_id or (tag == 0x1A and end - start > MAX_TEXT):
                return False
            parameters.has_id = True
            parameters.correlation_id = value
        elif key == "sequence_start" or key == "sequence_end":
            number = 1 if key == "sequence_start" else 2
            if tag != 0x08 or parameters.seen & number:
                return False
            parameters.seen |= number
            if value:
                parameters.flags |= number
        elif key == "triton_enable_empty_final_response":
            if tag != 0x08 or parameters.seen & 4:
                return False
            parameters.seen |= 4
            parameters.empty_final = value
        elif key in _WITH_RULES or key in parameters.others or key.startswith("triton_"):
            return False
        else:
            parameters.others[key] = value
        return True


cdef class Parameters:
    """The parameters of a request."""

    cdef dict others
    cdef object correlation_id
    cdef bint has_id, empty_final
    cdef int seen, flags


cdef Py_ssize_t read_field(bytes data, Py_ssize_t* position, Py_ssize_t end, int tag):
    """As `read_length`, if the field has this tag."""
    if position[0] >= end or <unsigned char>data[position[0]] != tag:
        return -1
    position[0] += 1
    return read_length(data, position, end)


cdef Py_ssize_t read_length(bytes data, Py_ssize_t* position, Py_ssize_t end):
    """Reads the length of a field: moves to its end, returns its start, or -1 if it is unusual."""
    cdef Py_ssize_t start = position[0]
    cdef int64_t value = read_varint(data, position, end)
    if value < 0 or position[0] - start > 4 or value > end - position[0]:
        return -1
    start = position[0]
    position[0] += <Py_ssize_t>value
    return start


cdef int64_t read_varint(bytes data, Py_ssize_t* position, Py_ssize_t end):
    """A number that is not negative, of at most nine bytes; else -1."""
    cdef int64_t value = 0
    cdef int shift = 0, byte
    while position[0] < end and shift < 63:
        byte = <unsigned char>data[position[0]]
        position[0] += 1
        value |= <int64_t>(byte & 0x7F) << shift
        if byte < 0x80:
            return value
        shift += 7
    return -1


cdef int64_t read_digits(bytes data, Py_ssize_t position, Py_ssize_t end):
    """A number of at most eight decimal digits; else -1."""
    cdef int64_t value = 0
    if not 0 < end - position < 9:
        return -1
    while position < end:
        if not 0x30 <= <unsigned char>data[position] <= 0x39:
            return -1
        value = value * 10 + <unsigned char>data[position] - 0x30
        position += 1
    return value


cdef frozenset _WITH_RULES = frozenset(("priority", "timeout"))
cdef frozenset _PSEUDO_FIELDS = frozenset((b":method", b":scheme", b":path", b":authority"))


include "_http2.pxi"
include "_responses.pxi"
include "_results.pxi"
include "_rings.pxi"
