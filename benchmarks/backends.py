"""Measures what a backend and the server add to the time of a framework's model.

    python -m benchmarks.backends [--seconds S] [--threads N]

Each network runs in three ways: called directly in this process, through the backend in this
process, and through an in-process server whose instance is a separate process. The three take turns
at every call, so a disturbance affects all of them. Results are medians.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
import uvloop
from torch import Tensor, nn

from host.options.options import Options
from host.server.server import Server
from pb_utils import testing

BATCHES = (1, 8, 32)
BACKENDS = Path(__file__).parents[1] / "stub" / "backends"
FILES = {"onnxruntime": "model.onnx", "pytorch": "model.pt"}
THREADS = {
    "onnxruntime": ("intra_op_thread_count", "inter_op_thread_count"),
    "pytorch": ("INTRA_OP_THREAD_COUNT",),
}


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.path = nn.Sequential(
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
            nn.ReLU(),
            nn.Conv2d(channels, channels, 3, padding=1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        return torch.relu(x + self.path(x))


def mlp() -> nn.Module:
    """A network with 0.4 million weights."""
    sizes = (256, 512, 512)
    hidden = [[nn.Linear(a, b), nn.ReLU()] for a, b in zip(sizes, sizes[1:], strict=False)]
    return nn.Sequential(*sum(hidden, []), nn.Linear(sizes[-1], 10))


def resnet() -> nn.Module:
    """A network with two stages of two residual blocks."""
    return nn.Sequential(
        *(nn.Conv2d(3, 16, 3, 2, 1), nn.ReLU(), Residual(16), Residual(16)),
        *(nn.Conv2d(16, 32, 3, 2, 1), nn.ReLU(), Residual(32), Residual(32)),
        *(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)),
    )


NETWORKS: dict[str, tuple[str, Callable[[], nn.Module], tuple[int, ...]]] = {
    "mlp_onnx": ("onnxruntime", mlp, (256,)),
    "mlp_torchscript": ("pytorch", mlp, (256,)),
    "resnet_onnx": ("onnxruntime", resnet, (3, 64, 64)),
    "resnet_torchscript": ("pytorch", resnet, (3, 64, 64)),
}


def configuration(name: str, threads: int) -> dict[str, Any]:
    """A model configuration with one instance and without dynamic batching."""
    backend, _, shape = NETWORKS[name]
    return {
        "name": name,
        "backend": backend,
        "max_batch_size": max(BATCHES),
        "default_model_filename": FILES[backend],
        "input": [{"name": "X", "data_type": "TYPE_FP32", "dims": list(shape)}],
        "output": [{"name": "Y", "data_type": "TYPE_FP32", "dims": [10]}],
        "instance_group": [{"name": name, "kind": "KIND_CPU", "count": 1}],
        "parameters": {key: {"string_value": str(threads)} for key in THREADS[backend]},
    }


def protobuf(config: dict[str, Any]) -> str:
    """The configuration in text form."""
    x, y = config["input"][0], config["output"][0]
    parameters = "".join(
        f"parameters {{ key: '{key}' value {{ string_value: '{value['string_value']}' }} }}\n"
        for key, value in config["parameters"].items()
    )
    return (
        f"backend: '{config['backend']}'\nmax_batch_size: {config['max_batch_size']}\n"
        f"input {{ name: 'X' data_type: {x['data_type']} dims: {x['dims']} }}\n"
        f"output {{ name: 'Y' data_type: {y['data_type']} dims: {y['dims']} }}\n"
        f"instance_group {{ kind: KIND_CPU count: 1 }}\n{parameters}"
    )


def write(repository: Path, name: str, threads: int) -> Path:
    """Writes the network's file, with a fixed seed, and its configuration; returns the path."""
    backend, make, shape = NETWORKS[name]
    folder = repository / name
    path = folder / "1" / FILES[backend]
    path.parent.mkdir(parents=True)
    torch.manual_seed(7)
    network, example = make().eval(), torch.zeros(1, *shape)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if backend == "pytorch":
            torch.jit.save(torch.jit.trace(network, example), path)
        else:
            torch.onnx.export(
                network,
                (example,),
                str(path),
                dynamo=False,
                opset_version=17,
                input_names=["X"],
                output_names=["Y"],
                dynamic_axes={"X": {0: "N"}, "Y": {0: "N"}},
            )
    (folder / "config.pbtxt").write_text(protobuf(configuration(name, threads)))
    return path


def plain(backend: str, path: Path, threads: int) -> Callable[[np.ndarray], np.ndarray]:
    """A function that calls the framework directly."""
    if backend == "pytorch":
        torch.set_num_threads(threads)
        module = torch.jit.load(path)

        def run(x: np.ndarray) -> np.ndarray:
            with torch.inference_mode():
                result: np.ndarray = module(torch.from_numpy(x)).numpy()
                return result

        return run
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = threads
    session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    return lambda x: session.run(["Y"], {"X": x})[0]


async def measure(
    name: str, path: Path, server: Server, batch: int, seconds: float, threads: int
) -> tuple[float, float, float]:
    """Median microseconds of the framework, of the backend and of the server."""
    backend, _, shape = NETWORKS[name]
    library = plain(backend, path, threads)
    x = np.random.default_rng(7).random((batch, *shape), dtype=np.float32)
    times: tuple[list[float], list[float], list[float]] = ([], [], [])
    config = configuration(name, threads)
    with testing.load(path.parents[1], config, backend=BACKENDS / backend) as held:
        request = held.request({"X": x})
        end = time.monotonic() + seconds
        warm = -20  # warm-up runs; TorchScript compiles during the first ones
        while time.monotonic() < end or warm < 50:
            began = time.perf_counter()
            expected = library(x)
            after = time.perf_counter()
            held.model.execute([request])
            between = time.perf_counter()
            result = await server.infer(name, {"X": x})
            ended = time.perf_counter()
            if warm < 0:
                np.testing.assert_allclose(result["Y"], expected, rtol=1e-3, atol=1e-4)
            else:
                for figures, taken in zip(
                    times, (after - began, between - after, ended - between), strict=True
                ):
                    figures.append(taken * 1e6)
            warm += 1
    first, second, third = (statistics.median(each) for each in times)
    return first, second, third


async def compare(repository: Path, seconds: float, threads: int) -> None:
    """Measures all networks and prints the table."""
    paths = {name: write(repository, name, threads) for name in NETWORKS}
    options = Options(
        model_repository=[str(repository)],
        allow_grpc=False,
        allow_http=False,
        allow_metrics=False,
    )
    print("| network | batch | library µs | backend adds µs | | server adds µs | |")
    print("|---|---|---|---|---|---|---|")
    async with Server(options) as server:
        for name, path in paths.items():
            for batch in BATCHES:
                library, backend, whole = await measure(name, path, server, batch, seconds, threads)
                added, most = backend - library, whole - library
                print(
                    f"| {name} | {batch} | {library:,.0f} | {added:,.0f} | {added / library:.0%}"
                    f" | {most:,.0f} | {most / library:.0%} |",
                    flush=True,
                )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=4, help="measuring time of each row")
    parser.add_argument("--threads", type=int, default=1, help="threads of the framework")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        # `pbhost serve` uses uvloop, and busy-polling needs it.
        uvloop.run(compare(Path(folder), arguments.seconds, arguments.threads))


if __name__ == "__main__":
    main()
