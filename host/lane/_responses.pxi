# Messages of responses: `encode_infer_response` of host.frontends.grpc.


def encode_response(response, dict heads not None, bytes stream_flag):
    """Encodes a response whose outputs are bytes and described in `heads`; None for others.

    `heads`: the fields with the model and its outputs, by what they are made of. `stream_flag`: the
    field that says whether a response of a stream is its last; None for a ModelInferResponse.
    """
    cdef list described = [response.model_name, response.model_version], parts = [None]
    cdef Py_ssize_t size = len(response.id)
    for tensor in response.outputs:
        data = tensor.data
        if type(data) is not bytes:
            return None
        size += len(data)
        described += (tensor.name, tensor.datatype, *tensor.shape)
        parts += (field_head(0x32, len(data)), data)
    head = heads.get(tuple(described))
    if head is None or response.parameters or size > MAX_MESSAGE:
        return None
    if response.id:
        request_id = response.id.encode("utf-8", "replace")
        head += field_head(0x1A, len(request_id)) + request_id
    parts[0] = head
    message = b"".join(parts)
    if stream_flag is None:
        return message
    return field_head(0x12, len(stream_flag) + len(message)) + stream_flag + message


cdef bytes field_head(int tag, Py_ssize_t length):
    """The tag and the length of a field."""
    cdef unsigned char[11] out
    cdef int size = 1
    out[0] = tag
    while length > 127:
        out[size] = length & 127 | 128
        length >>= 7
        size += 1
    out[size] = length
    return out[: size + 1]
