"""Responses that their callers do not read are dropped at the deadline of the call."""

from __future__ import annotations

from contextlib import closing

import numpy as np
import pytest
from hyperframe.frame import DataFrame, SettingsFrame
from tritonclient.grpc import service_pb2 as pb

from tests.clients import tensor
from tests.conftest import GRPC_ENGINE, RepositoryBuilder, Serve
from tests.unit.host.frontends.grpc.h2.h2_peer import Peer, grpc_message

MIB = 1 << 20
METHOD = "/inference.GRPCInferenceService/ModelInfer"
CANCEL = 8
CALLS = 24


@pytest.mark.skipif(GRPC_ENGINE != "h2", reason="grpcio has its own sending")
def test_unread_unary_responses_are_dropped_at_the_deadline(
    repository: RepositoryBuilder, serve: Serve
) -> None:
    repository.copy("identity")
    host = serve(repository).wait_started()
    numbers = np.zeros(MIB, dtype=np.float32)
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", numbers)])
    request = pb.ModelInferRequest(model_name="identity")
    request.inputs.add(name="INPUT0", datatype="FP32", shape=[MIB])
    request.raw_input_contents.append(numbers.tobytes())
    message = grpc_message(request.SerializeToString())
    peer = Peer(int(host.url.rpartition(":")[2]), {SettingsFrame.INITIAL_WINDOW_SIZE: 0})
    with closing(peer):
        streams = []
        for _ in range(CALLS):
            streams.append(peer.open(METHOD, ("grpc-timeout", "5S")))
            for start in range(0, len(message), 16384):
                end = ["END_STREAM"] if start + 16384 >= len(message) else []
                peer.send(DataFrame(streams[-1], message[start : start + 16384], flags=end))
            peer.settle()
        assert [peer.reset_code(stream) for stream in streams] == [CANCEL] * CALLS
        with host.client() as client:
            client.infer("identity", [tensor("INPUT0", numbers)])
