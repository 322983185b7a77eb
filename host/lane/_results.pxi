# The results of whole batches: `decode_to_host` of stub.wire.messages, with
# `TensorTransfer.decode_outputs` of host.instances.


@cython.final
cdef class ResultsReader:
    """Decodes frames with the responses of a batch and its end."""

    cdef object tensor_class, times_class
    cdef dict names

    def __init__(self, tensor_class, times_class, dict names):
        """`names`: of datatypes, by number."""
        self.tensor_class = tensor_class
        self.times_class = times_class
        self.names = names

    def decode_results(self, bytes frame not None):
        """Returns the number of the batch, the outputs for each request, and the times.

        Each request has one response, without an error, parameters and shared memory.
        """
        cdef FrameReader reader = FrameReader.__new__(FrameReader)
        cdef Py_ssize_t index, count
        cdef int64_t number = -1, started, inputs_ready, outputs_begin, ended
        cdef list found = []
        reader.frame = frame
        count = reader.length(0x90, 16, 0xDC, False)
        for index in range(count - 1):
            reader.expect(b"\x95\xa8response")
            if index == 0:
                number = reader.integer()
            elif reader.integer() != number:
                return None
            if reader.integer() != index:
                return None
            reader.expect(b"\x93")
            found.append(self.read_outputs(reader))
            reader.expect(b"\x80\xc0\xc3")
            if reader.unusual:
                return None
        reader.expect(b"\x99\xa4done")
        if reader.integer() != number:
            return None
        started, inputs_ready = reader.integer(), reader.integer()
        outputs_begin, ended = reader.integer(), reader.integer()
        reader.expect(b"\xc0\x90\x90")
        if reader.unusual or reader.position != PyBytes_GET_SIZE(frame):
            return None
        if not 0 < started <= inputs_ready <= outputs_begin <= ended:
            return None
        return number, found, self.times_class(started, inputs_ready, outputs_begin, ended)

    cdef list read_outputs(self, FrameReader reader):
        cdef Py_ssize_t count = reader.length(0x90, 16, 0xDC, False), rank, start, size
        cdef const char* name
        cdef list outputs = [], shape
        while count > 0 and not reader.unusual:
            count -= 1
            reader.expect(b"\x97")
            start = reader.skip(reader.length(0xA0, 32, 0xDA, True))
            name = PyBytes_AS_STRING(reader.frame) + start
            size = reader.position - start
            datatype = self.names.get(reader.integer())
            shape = []
            rank = reader.length(0x90, 16, 0xDC, False)
            while rank > 0 and not reader.unusual:
                rank -= 1
                shape.append(reader.integer())
            start = reader.skip(reader.length(0, 0, 0xC5, True))
            data = PyBytes_FromStringAndSize(
                PyBytes_AS_STRING(reader.frame) + start, reader.position - start
            )
            reader.expect(b"\0\0\0")
            if datatype is None:
                reader.unusual = True
                break
            try:
                text = PyUnicode_DecodeUTF8(name, size, NULL)
            except UnicodeDecodeError:
                reader.unusual = True
                break
            outputs.append(self.tensor_class(text, datatype, shape, data))
        return outputs


@cython.final
cdef class FrameReader:
    """Reads msgpack. `unusual`: something else came than what was to be read, or nothing."""

    cdef bytes frame
    cdef Py_ssize_t position
    cdef bint unusual

    cdef inline Py_ssize_t skip(self, Py_ssize_t size):
        """Moves over bytes; returns where they start."""
        if size > PyBytes_GET_SIZE(self.frame) - self.position:
            self.unusual = True
            size = 0
        self.position += size
        return self.position - size

    cdef void expect(self, bytes expected):
        cdef Py_ssize_t size = PyBytes_GET_SIZE(expected), start = self.skip(size)
        cdef const char* data = PyBytes_AS_STRING(self.frame)
        if self.unusual or memcmp(data + start, PyBytes_AS_STRING(expected), size):
            self.unusual = True

    cdef inline int byte(self):
        if self.position >= PyBytes_GET_SIZE(self.frame):
            self.unusual = True
            return 0
        self.position += 1
        return <unsigned char>PyBytes_AS_STRING(self.frame)[self.position - 1]

    cdef int64_t big_endian(self, Py_ssize_t size):
        """A number that is not negative."""
        cdef Py_ssize_t index, start = self.skip(size)
        cdef uint64_t value = 0
        cdef const unsigned char* data = <const unsigned char*>PyBytes_AS_STRING(self.frame)
        for index in range(start, self.position):
            value = value << 8 | data[index]
        if value >> 63:
            self.unusual = True
        return <int64_t>(value & 0x7FFFFFFFFFFFFFFF)

    cdef int64_t integer(self):
        cdef int first = self.byte()
        if 0xCC <= first <= 0xCF:
            return self.big_endian(1 << (first - 0xCC))
        if first > 127:
            self.unusual = True
        return first

    cdef Py_ssize_t length(self, int shortest, int limit, int code, bint bytes8):
        """Of an array, a text or bytes. `code`: of a length with two bytes."""
        cdef int first = self.byte()
        if shortest <= first < shortest + limit:
            return first - shortest
        if first == code or (bytes8 and first == code - 1):
            return self.big_endian(2) if first == code else self.byte()
        self.unusual = True
        return 0
