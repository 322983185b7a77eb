"""Client of `data_pipeline`: sends text, numbers, an image and a flag through two models."""

import argparse

import numpy as np
import tritonclient.grpc as grpcclient
from tritonclient.utils import np_to_triton_dtype


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    arguments = parser.parse_args()
    image = np.zeros((4, 6, 3), np.float32)
    image[:, :2] = 1  # white on the left
    given = {
        "WORDS": np.array(["white", "on", "the", "left"], dtype=np.object_),
        "LEVELS": np.array([0, 100, 255], dtype=np.uint8),
        "OFFSETS": np.array([-3, 0, 120], dtype=np.int8),
        "IMAGE": image,
        "MIRROR": np.array([False]),  # data_first inverts it
    }
    inputs = []
    for name, array in given.items():
        tensor = grpcclient.InferInput(name, array.shape, np_to_triton_dtype(array.dtype))
        inputs.append(tensor.set_data_from_numpy(array))
    with grpcclient.InferenceServerClient(arguments.url) as client:
        result = client.infer("data_pipeline", inputs)
    print("caption:", result.as_numpy("CAPTION")[0].decode())
    print("levels:", result.as_numpy("LEVELS_OUT").tolist())
    print("offsets:", result.as_numpy("OFFSETS_OUT").tolist())
    print("first row of the image:", result.as_numpy("IMAGE_OUT")[0].tolist())
    print("bright:", result.as_numpy("BRIGHT")[0])


if __name__ == "__main__":
    main()
