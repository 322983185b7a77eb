"""A program with a server, as a user writes it. Type checkers read this file; it is never run."""

import numpy as np
from typing_extensions import reveal_type

import pbhost
from pbhost.bind import Host, TensorSpec, batch

options = pbhost.Options(model_repository=["models"], grpc_port=0)
reveal_type(options.grpc_port)
with pbhost.BlockingServer(options) as server:
    outputs = server.infer("add_sub", {"INPUT0": np.zeros(4)})
    print(outputs["OUTPUT0"].tolist())
    reveal_type(server.stop())


def code(error: pbhost.HostError) -> str:
    reveal_type(error.code)
    return error.code.value


@batch
def double(x: np.ndarray) -> list[np.ndarray]:
    return [x * 2]


with Host(grpc_port=0) as host:
    host.bind("double", double, [TensorSpec((1,), np.float32)], [TensorSpec((1,), np.float32)])
    reveal_type(host.grpc_url)
with pbhost.testing.load("models/double") as model:
    reveal_type(model)
