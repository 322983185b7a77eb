# Frames of usual unary requests and of their responses. The rules are those of `FrameReader` and
# `UnaryCall` in host.frontends.grpc.h2.

cdef enum:
    FRAME_HEADER = 9  # bytes
    PREFIX = 5  # bytes, of a message
    DATA = 0
    HEADERS = 1
    WINDOW_UPDATE = 8
    END_STREAM = 0x1
    HEADERS_FLAGS = 0x2D  # END_STREAM, END_HEADERS, PADDED and PRIORITY
    END_HEADERS = 0x4
    PADDED = 0x8
    MAX_UPDATES = 4  # WINDOW_UPDATE frames before the data


cdef struct Frame:
    int kind, flags
    uint32_t stream
    Py_ssize_t start, stop  # of the payload


def read_request(bytes data not None, Py_ssize_t position, Py_ssize_t max_frame):
    """Reads HEADERS and DATA of a request with one message, and the WINDOW_UPDATEs with them.

    Returns None, or: the end of its frames, its stream, its header block, its message, the size of
    the data, the increment of the stream's window, and that of the connection's, which is after the
    data.
    """
    cdef Frame head, body
    cdef uint32_t increment = 0, connection_increment = 0, length
    if not read_frame(data, position, max_frame, &head):
        return None
    if head.kind != HEADERS or head.flags & HEADERS_FLAGS != END_HEADERS or not head.stream & 1:
        return None
    position = read_updates(data, head.stop, head.stream, MAX_UPDATES, &increment)
    if not read_frame(data, position, max_frame, &body):
        return None
    if body.kind != DATA or body.flags & (END_STREAM | PADDED) != END_STREAM:
        return None
    if body.stream != head.stream or body.stop - body.start < PREFIX:
        return None
    length = read_number(data, body.start + 1)
    if data[body.start] or length != body.stop - body.start - PREFIX:
        return None
    position = read_updates(data, body.stop, 0, 1, &connection_increment)
    return (
        position,
        head.stream,
        data[head.start : head.stop],
        data[body.start + PREFIX : body.stop],
        body.stop - body.start,
        increment,
        connection_increment,
    )


cdef bint read_frame(bytes data, Py_ssize_t position, Py_ssize_t max_frame, Frame* frame) except -1:
    """Reads the header of a frame; returns whether all of the frame is there."""
    cdef Py_ssize_t end = PyBytes_GET_SIZE(data), length
    if end - position < FRAME_HEADER:
        return False
    length = read_number(data, position) >> 8
    frame.kind = <unsigned char>data[position + 3]
    frame.flags = <unsigned char>data[position + 4]
    frame.stream = read_number(data, position + 5) & 0x7FFFFFFF
    frame.start = position + FRAME_HEADER
    frame.stop = frame.start + length
    return length <= max_frame and frame.stop <= end


cdef Py_ssize_t read_updates(
    bytes data, Py_ssize_t position, uint32_t stream, int most, uint32_t* increment
) except -1:
    """Adds up the first WINDOW_UPDATE frames of a stream, and returns their end.

    A frame that may break a rule is not read.
    """
    cdef Frame frame
    cdef uint32_t number
    cdef int count = 0
    while count < most and read_frame(data, position, 4, &frame):
        if frame.kind != WINDOW_UPDATE or frame.stream != stream or frame.stop - frame.start != 4:
            break
        number = read_number(data, frame.start) & 0x7FFFFFFF
        if number == 0 or increment[0] + number > 0x7FFFFFFF:
            break
        increment[0] += number
        count += 1
        position = frame.stop
    return position


cdef uint32_t read_number(bytes data, Py_ssize_t position) except? 1:
    """Four bytes."""
    return (
        <uint32_t><unsigned char>data[position] << 24
        | <uint32_t><unsigned char>data[position + 1] << 16
        | <uint32_t><unsigned char>data[position + 2] << 8
        | <uint32_t><unsigned char>data[position + 3]
    )


cdef class ResponseWriter:
    """Encodes whole responses: `encode_response` of host.frontends.grpc.h2.calls."""

    cdef bytes head, tail
    cdef Py_ssize_t head_size, tail_size

    def __init__(self, bytes headers not None, bytes trailers not None):
        """The HEADERS frames with the headers and trailers of a response, of stream 0."""
        if len(headers) < FRAME_HEADER or len(trailers) < FRAME_HEADER:
            raise ValueError("a frame is too short")
        self.head, self.tail = headers, trailers
        self.head_size, self.tail_size = len(headers), len(trailers)

    def encode(self, uint32_t stream, bytes message not None):
        """The frames of a response with one message, which fits into a frame."""
        cdef Py_ssize_t size = PyBytes_GET_SIZE(message)
        cdef bytes response = PyBytes_FromStringAndSize(
            NULL, self.head_size + FRAME_HEADER + PREFIX + size + self.tail_size
        )
        cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(response)
        memcpy(out, PyBytes_AS_STRING(self.head), self.head_size)
        write_number(out + 5, stream)
        out += self.head_size
        write_number(out, <uint32_t>(size + PREFIX) << 8 | DATA)
        out[4] = 0
        write_number(out + 5, stream)
        out[FRAME_HEADER] = 0
        write_number(out + FRAME_HEADER + 1, <uint32_t>size)
        out += FRAME_HEADER + PREFIX
        memcpy(out, PyBytes_AS_STRING(message), size)
        out += size
        memcpy(out, PyBytes_AS_STRING(self.tail), self.tail_size)
        write_number(out + 5, stream)
        return response


cdef void write_number(unsigned char* out, uint32_t number) noexcept:
    out[0] = number >> 24
    out[1] = number >> 16 & 0xFF
    out[2] = number >> 8 & 0xFF
    out[3] = number & 0xFF
