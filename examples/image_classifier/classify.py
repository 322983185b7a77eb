"""Client of the classifiers: sends one image of each shape over HTTP, prints the top classes."""

import argparse

import numpy as np
import tritonclient.http as httpclient
from build import KINDS, draw


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8000")
    parser.add_argument("models", nargs="*", default=["shapes_onnx", "shapes_torchscript"])
    arguments = parser.parse_args()
    random = np.random.default_rng(7)
    images = np.stack([draw(kind, random) for kind in KINDS])
    given = httpclient.InferInput("IMAGE", images.shape, "FP32").set_data_from_numpy(images)
    wanted = httpclient.InferRequestedOutput("KIND", class_count=2)
    with httpclient.InferenceServerClient(arguments.url) as client:
        for model in arguments.models:
            answers = client.infer(model, [given], outputs=[wanted]).as_numpy("KIND")
            for kind, (first, second) in zip(KINDS, answers, strict=True):
                print(f"{model}: a {kind} is {first.decode()}, or {second.decode()}")


if __name__ == "__main__":
    main()
