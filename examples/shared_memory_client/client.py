"""Blends images that it keeps in shared memory: neither images nor results are sent."""

import uuid

import numpy as np
import tritonclient.grpc as grpcclient
import tritonclient.utils.shared_memory as shm

import pbhost

SHAPE = (1080, 1920, 3)
SIZE = int(np.prod(SHAPE))


class Region:
    """A region of shared memory that the server knows too, for as long as the block runs."""

    def __init__(self, client: grpcclient.InferenceServerClient, size: int) -> None:
        self.client, self.size = client, size
        self.name = f"blend-{uuid.uuid4().hex}"  # other clients have regions, too

    def __enter__(self) -> "Region":
        self.handle = shm.create_shared_memory_region(self.name, f"/{self.name}", self.size)
        self.client.register_system_shared_memory(self.name, f"/{self.name}", self.size)
        return self

    def __exit__(self, *error: object) -> None:
        self.client.unregister_system_shared_memory(self.name)
        shm.destroy_shared_memory_region(self.handle)


with grpcclient.InferenceServerClient("localhost:8001") as client:
    with Region(client, 2 * SIZE) as images, Region(client, SIZE) as blended:
        pair = grpcclient.InferInput("IMAGES", [2, *SHAPE], "UINT8")
        pair.set_shared_memory(images.name, images.size)
        share = grpcclient.InferInput("SHARE", [1], "FP32")
        share.set_data_from_numpy(np.array([0.25], np.float32))
        wanted = grpcclient.InferRequestedOutput("BLENDED")
        wanted.set_shared_memory(blended.name, blended.size)
        result = shm.get_contents_as_numpy(blended.handle, np.uint8, SHAPE)
        for brightness in (100, 200):  # the regions are made once and used for each request
            shm.set_shared_memory_region(
                images.handle, [np.zeros(SHAPE, np.uint8), np.full(SHAPE, brightness, np.uint8)]
            )
            response = client.infer("blend", [pair, share], outputs=[wanted]).get_response()
            print(f"{result.nbytes:,} bytes, all {np.unique(result)[0]};", end=" ")
            print(f"the message of the response had {response.ByteSize()}")

with pbhost.Client("localhost:8001") as client:  # uses shared memory without being told
    frames = np.stack([np.zeros(SHAPE, np.uint8), np.full(SHAPE, 240, np.uint8)])
    result = client.infer("blend", IMAGES=frames, SHARE=0.25)["BLENDED"]
    print(f"{result.nbytes:,} bytes, all {np.unique(result)[0]}")
