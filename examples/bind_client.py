"""Client of `bind_function.py`: a network of one layer, text, and a stream."""

import argparse

import numpy as np

import pbhost


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--url", default="localhost:8001")
    with pbhost.Client(parser.parse_args().url) as client:
        x = np.eye(4, dtype=np.float32)[:2]
        for inputs in ({"x": x}, {"x": x, "temperature": [[0.1], [0.1]]}):
            result = client.infer("linear", inputs)
            print(np.round(result["probabilities"], 2).tolist())
        shouted = client.infer("shout", text=[["Köln"], ["Bonn"]])["text"]
        print([each.decode() for each in shouted[:, 0]])
        for part in client.stream("countdown", start=3):
            print(part["left"].item(), end=" ")
        print("liftoff")


if __name__ == "__main__":
    main()
