"""Blends images that it keeps in shared memory: neither images nor results are sent."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm

import pbhost

SHAPE = (1080, 1920, 3)
SIZE = int(np.prod(SHAPE))


@contextmanager
def region(client: grpcclient.InferenceServerClient, size: int) -> Iterator[tuple[str, Any]]:
    """A region of shared memory that the server knows too, for as long as the block runs."""
    name = f"blend-{uuid.uuid4().hex}"  # other clients have regions, too
    handle = shm.create_shared_memory_region(name, f"/{name}", size)
    try:
        client.register_system_shared_memory(name, f"/{name}", size)
        try:
            yield name, handle
        finally:
            client.unregister_system_shared_memory(name)
    finally:
        shm.destroy_shared_memory_region(handle)


with grpcclient.InferenceServerClient("localhost:8001") as client:
    with region(client, 2 * SIZE) as (given, images), region(client, SIZE) as (made, blended):
        pair = grpcclient.InferInput("IMAGES", [2, *SHAPE], "UINT8")
        pair.set_shared_memory(given, 2 * SIZE)
        share = grpcclient.InferInput("SHARE", [1], "FP32")
        share.set_data_from_numpy(np.array([0.25], np.float32))
        wanted = grpcclient.InferRequestedOutput("BLENDED")
        wanted.set_shared_memory(made, SIZE)
        result = shm.get_contents_as_numpy(blended, np.uint8, SHAPE)
        for brightness in (100, 200):  # the regions are made once and used for each request
            shm.set_shared_memory_region(
                images, [np.zeros(SHAPE, np.uint8), np.full(SHAPE, brightness, np.uint8)]
            )
            response = client.infer("blend", [pair, share], outputs=[wanted]).get_response()
            print(f"{result.nbytes:,} bytes, all {np.unique(result)[0]};", end=" ")
            print(f"the message of the response had {response.ByteSize()}")

with pbhost.Client("localhost:8001") as client:  # uses shared memory without being told
    frames = np.stack([np.zeros(SHAPE, np.uint8), np.full(SHAPE, 240, np.uint8)])
    result = client.infer("blend", IMAGES=frames, SHARE=0.25)["BLENDED"]
    print(f"{result.nbytes:,} bytes, all {np.unique(result)[0]}")
