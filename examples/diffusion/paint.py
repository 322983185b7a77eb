"""Client of `picture_maker`: sends a prompt, prints the picture in letters, and can save it."""

import argparse
from pathlib import Path

import numpy as np
import tritonclient.grpc as grpcclient
from PIL import Image

LETTERS = " RGYBMCW"
"""One letter for each mixture of red, green and blue."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, help="where the picture goes, such as disc.png")
    parser.add_argument("prompt", nargs="?", default="a red disc")
    given = parser.parse_args()
    inputs = [
        grpcclient.InferInput("PROMPT", [1], "BYTES").set_data_from_numpy(
            np.array([given.prompt.encode()], dtype=np.object_)
        ),
        grpcclient.InferInput("STEPS", [1], "INT32").set_data_from_numpy(
            np.array([given.steps], np.int32)
        ),
        grpcclient.InferInput("SEED", [1], "INT64").set_data_from_numpy(
            np.array([given.seed], np.int64)
        ),
    ]
    with grpcclient.InferenceServerClient(given.url) as client:
        image = client.infer("picture_maker", inputs).as_numpy("IMAGE")
    for row in image[2::8, 2::4] > 127:
        print("".join(LETTERS[mixture] for mixture in row @ (1, 2, 4)).rstrip())
    if given.save is not None:
        Image.fromarray(image).save(given.save)


if __name__ == "__main__":
    main()
