# Records of rings: `RingWriter` and `RingReader` of stub.wire.ring. A memory that is not a ring,
# because it was closed, is left to Python, and so are positions that only a fault can cause.

cdef enum:
    RING_BYTES = 1 << 19
    RING_START = 64  # of the first record
    RING_CAPACITY = RING_BYTES - RING_START
    MAX_RECORD = 1 << 17


def write_record(memory not None, int64_t written, bytes frame not None):
    """Writes a record that needs no wrap; returns where the next one starts, or 0."""
    cdef Py_buffer view
    cdef Py_ssize_t size = PyBytes_GET_SIZE(frame)
    cdef int64_t used, position, needed = (size + 7) & ~3
    cdef uint32_t length = size & 0xFFFFFFFF
    cdef char* ring
    PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)
    try:
        if view.readonly or view.len != RING_BYTES or written < 0 or size > MAX_RECORD:
            return 0
        ring = <char*>view.buf
        used = <int64_t>(<uint64_t>written - (<uint64_t*>ring)[0])  # no overflow, whatever it holds
        position = written % RING_CAPACITY
        if not 0 <= used <= RING_CAPACITY - needed or needed > RING_CAPACITY - position:
            return 0
        memcpy(ring + RING_START + position, &length, 4)
        memcpy(ring + RING_START + position + 4, PyBytes_AS_STRING(frame), size)
        return written + needed
    finally:
        PyBuffer_Release(&view)


def read_record(memory not None, int64_t read, int64_t limit):
    """Returns the record at `read`, if it is a whole frame and ends at `limit` or before."""
    cdef Py_buffer view
    cdef int64_t position, needed
    cdef uint32_t size
    cdef char* ring
    PyObject_GetBuffer(memory, &view, PyBUF_SIMPLE)
    try:
        if view.len != RING_BYTES or read < 0:
            return None
        ring = <char*>view.buf
        position = read % RING_CAPACITY
        memcpy(&size, ring + RING_START + position, 4)
        needed = (<int64_t>size + 7) & ~3
        if size > MAX_RECORD or needed > RING_CAPACITY - position or needed > limit - read:
            return None
        return PyBytes_FromStringAndSize(ring + RING_START + position + 4, size)
    finally:
        PyBuffer_Release(&view)
