"""Serves functions of this program as models, without repository or configuration. Ctrl-C stops it.

Run `python examples/bind_function.py`, then `python examples/bind_client.py`.
"""

import argparse
from collections.abc import Iterator

import numpy as np

from pbhost.bind import Host, TensorSpec, batch, fill_optionals, first_value, group_by_values


class Linear:
    """A network with one layer. Its weights are created once and used by every call."""

    def __init__(self, features: int, classes: int) -> None:
        random = np.random.default_rng(0)
        self.weights = random.normal(size=(features, classes)).astype(np.float32)

    @fill_optionals(temperature=np.array([1], dtype=np.float32))
    @group_by_values("temperature")
    @batch
    @first_value("temperature")
    def __call__(self, x: np.ndarray, temperature: np.float32) -> dict[str, np.ndarray]:
        """Computes a batch of samples; requests with the same temperature form a batch."""
        scores = np.exp(x @ self.weights / temperature)
        return {"probabilities": scores / scores.sum(axis=1, keepdims=True)}


@batch
def shout(text: np.ndarray) -> list[np.ndarray]:
    """Converts texts to capitals. Texts are arrays of bytes."""
    return [np.char.upper(np.char.decode(text.astype(np.bytes_), "utf-8"))]


@batch
def countdown(start: np.ndarray) -> Iterator[dict[str, np.ndarray]]:
    """Sends any number of responses to a request."""
    for left in range(int(start.max()), -1, -1):
        yield {"left": np.full_like(start, left)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--grpc-port", type=int, default=8001)
    parser.add_argument("--http-port", type=int, default=8000)
    parser.add_argument("--metrics-port", type=int, default=8002)
    ports = vars(parser.parse_args())
    with Host(**ports) as host:
        host.bind(
            "linear",
            Linear(features=4, classes=3),
            inputs=[
                TensorSpec(name="x", dtype=np.float32, shape=(4,)),
                TensorSpec(name="temperature", dtype=np.float32, shape=(1,), optional=True),
            ],
            outputs=[TensorSpec(name="probabilities", dtype=np.float32, shape=(3,))],
            max_batch_size=64,
            strict=True,
        )
        host.bind(
            "shout",
            [shout, shout],  # two instances
            inputs=[TensorSpec(name="text", dtype=np.bytes_, shape=(1,))],
            outputs=[TensorSpec(name="text", dtype=np.bytes_, shape=(1,))],
        )
        host.bind(
            "countdown",
            countdown,
            inputs=[TensorSpec(name="start", dtype=np.int32, shape=(1,))],
            outputs=[TensorSpec(name="left", dtype=np.int32, shape=(1,))],
            decoupled=True,
        )
        host.serve()


if __name__ == "__main__":
    main()
