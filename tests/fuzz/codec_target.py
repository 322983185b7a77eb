"""The gRPC codec, fed with any bytes as a ModelInferRequest."""

from __future__ import annotations

from google.protobuf.message import DecodeError
from tritonclient.grpc import service_pb2 as pb

from host.errors import HostError
from host.frontends.grpc.infer_request import (
    Shapes,
    parse_infer_request,
    read_usual_request,
    to_request,
)
from host.instances.regions import Regions
from stub.wire.arena import Block

_REGIONS = Regions(None)
_NOT_A_MESSAGE = "failed to parse the ModelInferRequest message"

SEEDS = [
    pb.ModelInferRequest(
        model_name="m",
        model_version="1",
        id="request",
        parameters={"sequence_id": pb.InferParameter(int64_param=7)},
        inputs=[
            pb.ModelInferRequest.InferInputTensor(name="IN", datatype="FP32", shape=[1, 2]),
            pb.ModelInferRequest.InferInputTensor(name="TEXT", datatype="BYTES", shape=[1]),
        ],
        outputs=[pb.ModelInferRequest.InferRequestedOutputTensor(name="OUT")],
        raw_input_contents=[bytes(8), b"\3\0\0\0abc"],
    ).SerializeToString(),
    pb.ModelInferRequest(
        model_name="m",
        inputs=[
            pb.ModelInferRequest.InferInputTensor(
                name="IN",
                datatype="INT32",
                shape=[2],
                contents=pb.InferTensorContents(int_contents=[1, 2]),
            )
        ],
        outputs=[
            pb.ModelInferRequest.InferRequestedOutputTensor(
                name="OUT",
                parameters={"classification": pb.InferParameter(int64_param=2)},
            )
        ],
    ).SerializeToString(),
]


def check(data: bytes, run: object = None) -> None:
    """Our walk and protobuf agree on which bytes are a message, and on its content; errors are
    HostErrors. The compiled lane takes only what is valid, and reads the same.
    """
    usual = read_usual_request(data, Shapes()) if read_usual_request is not None else None
    try:
        expected = pb.ModelInferRequest.FromString(data)
    except DecodeError:
        expected = None
    try:
        message = parse_infer_request(data)
    except HostError as error:
        assert expected is None and usual is None and str(error).startswith(_NOT_A_MESSAGE), error
        return
    assert expected is not None, "protobuf refuses what we take"
    assert message.model_name == expected.model_name
    assert message.model_version == expected.model_version
    assert message.id == expected.id
    raw = [bytes(one) for one in message.raw if not isinstance(one, Block)]
    assert raw == list(expected.raw_input_contents)
    heads = [(name, datatype, shape) for name, datatype, shape, _ in message.inputs]
    assert heads == [(i.name, i.datatype, tuple(i.shape)) for i in expected.inputs]
    assert [name for name, _ in message.outputs] == [o.name for o in expected.outputs]
    assert set(message.parameters) == set(expected.parameters)
    try:
        request = to_request(message, _REGIONS)
    except HostError:
        assert usual is None, "the lane takes what is refused"
        return
    assert [tensor.name for tensor in request.inputs] == [i.name for i in expected.inputs]
    if usual is not None:
        usual.shape = None
        assert usual == request
