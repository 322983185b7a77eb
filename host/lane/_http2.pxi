# Frames of usual requests, of messages of streams, and of responses. The rules are those of
# `FrameReader`, `UnaryCall` and `StreamCall` in host.frontends.grpc.h2.

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


def read_messages(bytes data not None, Py_ssize_t position, Py_ssize_t max_frame):
    """Reads a DATA frame with whole messages that does not end its stream.

    Returns None, or: the end of the frame, its stream, its messages as those of `MessageReader` in
    host.frontends.grpc.h2.grpc_messages, and the size of the data.
    """
    cdef Frame frame
    cdef uint32_t length
    cdef list messages = []
    if not read_frame(data, position, max_frame, &frame):
        return None
    if frame.kind != DATA or frame.flags & (END_STREAM | PADDED):
        return None
    position = frame.start
    while frame.stop - position >= PREFIX:
        length = read_number(data, position + 1)
        if data[position] or length > frame.stop - position - PREFIX:
            return None
        position += PREFIX + length
        messages.append((0, data[position - length : position], None))
    if position != frame.stop or not messages:
        return None
    return position, frame.stream, messages, position - frame.start


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


def encode_message(
    bytes head not None, bytes tail not None, uint32_t stream, bytes message not None
):
    """A DATA frame with a message, which fits into a frame, between HEADERS frames of stream 0.

    `encode_response` and `encode_stream_message` of host.frontends.grpc.h2.calls.
    """
    cdef Py_ssize_t size = PyBytes_GET_SIZE(message), before = PyBytes_GET_SIZE(head)
    cdef Py_ssize_t start = before + FRAME_HEADER + PREFIX, after = PyBytes_GET_SIZE(tail)
    if 0 < before < FRAME_HEADER or 0 < after < FRAME_HEADER:
        raise ValueError("a frame is too short")
    cdef bytes frames = PyBytes_FromStringAndSize(NULL, start + size + after)
    cdef unsigned char* out = <unsigned char*>PyBytes_AS_STRING(frames)
    memcpy(out, PyBytes_AS_STRING(head), before)
    if before:
        write_number(out + 5, stream)
    write_number(out + before, <uint32_t>(size + PREFIX) << 8 | DATA)
    out[before + 4] = 0
    write_number(out + before + 5, stream)
    out[before + FRAME_HEADER] = 0
    write_number(out + start - 4, <uint32_t>size)
    memcpy(out + start, PyBytes_AS_STRING(message), size)
    memcpy(out + start + size, PyBytes_AS_STRING(tail), after)
    if after:
        write_number(out + start + size + 5, stream)
    return frames


cdef void write_number(unsigned char* out, uint32_t number) noexcept:
    out[0] = number >> 24
    out[1] = number >> 16 & 0xFF
    out[2] = number >> 8 & 0xFF
    out[3] = number & 0xFF
