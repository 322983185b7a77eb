"""Measures the OpenAI routes against the other routes of the same server, and against LitServe.

    python -m benchmarks.openai_routes [--rivals FOLDER] [--rounds N] [--seconds S] [--keep]

All routes and servers are loaded in turns, so a disturbance affects all; h2load is the client.
`--rivals` names the folder with LitServe's environment, which is created if it is missing. `--keep`
writes the rows into docs/explanation/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from tritonclient.grpc import service_pb2 as pb

from benchmarks.h2load import GRPC, JSON, SERVICE, LoadResult, grpc_frame, h2load
from benchmarks.page import Report
from benchmarks.rivals import RIVALS, is_answering
from benchmarks.servers import RunningServer, free_port, ours, running

HERE = Path(__file__).resolve().parent
STREAMS = ("streams at once", "chunks/s: /v1/completions", "generate_stream", "ratio")
LITSERVE_STREAMS = ("chats at once", "chunks/s: /v1/chat/completions", "LitServe", "ratio")
FIRST_TOKEN = ("one stream, µs to its only token", "p50", "above ModelStreamInfer")
EMBEDDINGS = ("embeddings, 16 connections", "texts/s: /v1/embeddings", "/v2 JSON", "ratio")
CHUNKS = 200  # of one stream

_TEXT_MODEL = "repeat_text"
_EMBEDDING_MODEL = "embed_text"
_SENTENCE = "The quick brown fox jumps over the lazy dog."

Measurement = Callable[[], LoadResult]


class Client:
    """Sends requests to one server with h2load."""

    def __init__(self, server: RunningServer, seconds: float) -> None:
        self._server = server
        self._seconds = seconds

    def post(self, path: str, body: object, connections: int) -> LoadResult:
        """Sends a JSON body to a path of the HTTP port."""
        url = f"http://127.0.0.1:{self._server.http_port}{path}"
        return h2load(url, json.dumps(body).encode(), JSON, connections, self._seconds)

    def completions(self, words: int, streams: int) -> LoadResult:
        """Streams `words` words by `/v1/completions`."""
        body = {"model": _TEXT_MODEL, "prompt": str(words), "stream": True}
        return self.post("/v1/completions", body, streams)

    def chat(self, words: int, streams: int) -> LoadResult:
        """Streams `words` words by `/v1/chat/completions`."""
        messages = [{"role": "user", "content": str(words)}]
        body = {"model": _TEXT_MODEL, "messages": messages, "stream": True}
        return self.post("/v1/chat/completions", body, streams)

    def generate_stream(self, words: int, streams: int) -> LoadResult:
        """Streams `words` words by `generate_stream`."""
        path = f"/v2/models/{_TEXT_MODEL}/generate_stream"
        return self.post(path, {"text_input": str(words)}, streams)

    def model_stream_infer(self, words: int, streams: int) -> LoadResult:
        """Streams `words` words by gRPC's ModelStreamInfer."""
        message = pb.ModelInferRequest(model_name=_TEXT_MODEL)
        message.inputs.add(name="text_input", datatype="BYTES", shape=[1])
        text = str(words).encode()
        message.raw_input_contents.append(len(text).to_bytes(4, "little") + text)
        url = f"http://127.0.0.1:{self._server.grpc_port}/{SERVICE}/ModelStreamInfer"
        body = grpc_frame(message.SerializeToString())
        return h2load(url, body, GRPC, streams, self._seconds)

    def embeddings(self, encoding: str) -> LoadResult:
        """Asks for one embedding at a time on 16 connections."""
        body = {"model": _EMBEDDING_MODEL, "input": _SENTENCE, "encoding_format": encoding}
        return self.post("/v1/embeddings", body, 16)

    def infer_json(self) -> LoadResult:
        """Asks for the same embeddings by `/v2` with JSON tensors."""
        tensor = {"name": "text", "shape": [1, 1], "datatype": "BYTES", "data": [_SENTENCE]}
        return self.post(f"/v2/models/{_EMBEDDING_MODEL}/infer", {"inputs": [tensor]}, 16)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rivals", type=Path, metavar="FOLDER", help="folder with LitServe")
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--keep", action="store_true", help="write the rows into the page")
    arguments = parser.parse_args()
    report, rounds = Report(arguments.keep), arguments.rounds
    with ours(HERE / "repository") as server:
        client = Client(server, arguments.seconds)
        _compare_streams(report, client, rounds)
        _compare_first_token(report, client, rounds)
        _compare_embeddings(report, client, rounds)
        if arguments.rivals:
            with litserve(arguments.rivals) as rival:
                _compare_litserve(report, client, Client(rival, arguments.seconds), rounds)


@contextmanager
def litserve(folder: Path) -> Iterator[RunningServer]:
    """Runs LitServe with its OpenAISpec and the model that repeats a word."""
    (rival,) = [rival for rival in RIVALS if rival.name == "LitServe"]
    python = rival.install(folder) / "bin" / "python"
    port = free_port()
    command = [str(python), str(HERE / "rival_servers" / "litserve_chat.py"), str(port)]
    with running(command, 0, port, is_answering(f"http://127.0.0.1:{port}/health")) as server:
        yield server


def _compare_streams(report: Report, client: Client, rounds: int) -> None:
    for streams in (1, 16, 64):
        mine, other, ratio = _rates(
            lambda: client.completions(CHUNKS, streams),  # noqa: B023 - runs in this turn
            lambda: client.generate_stream(CHUNKS, streams),  # noqa: B023
            rounds,
        )
        rates = [f"{rate * CHUNKS:,.0f}" for rate in (mine, other)]
        report.row(STREAMS, [str(streams), *rates, f"**{ratio:.2f}x**"])


def _compare_litserve(report: Report, client: Client, rival: Client, rounds: int) -> None:
    for streams in (1, 16):
        mine, other, ratio = _rates(
            lambda: client.chat(CHUNKS, streams),  # noqa: B023 - runs in this turn
            lambda: rival.chat(CHUNKS, streams),  # noqa: B023
            rounds,
        )
        rates = [f"{rate * CHUNKS:,.0f}" for rate in (mine, other)]
        report.row(LITSERVE_STREAMS, [str(streams), *rates, f"**{ratio:.2f}x**"])


def _compare_first_token(report: Report, client: Client, rounds: int) -> None:
    ways: dict[str, Measurement] = {
        "gRPC ModelStreamInfer": lambda: client.model_stream_infer(1, 1),
        "/v1/completions": lambda: client.completions(1, 1),
        "/v1/chat/completions": lambda: client.chat(1, 1),
    }
    turns = [[measure().p50 for measure in ways.values()] for _ in range(rounds)]
    medians = [statistics.median(column) for column in zip(*turns, strict=True)]
    for name, median in zip(ways, medians, strict=True):
        report.row(FIRST_TOKEN, [name, f"{median:,.0f}", f"{median - medians[0]:,.0f}"])


def _compare_embeddings(report: Report, client: Client, rounds: int) -> None:
    for encoding in ("float", "base64"):
        mine, other, ratio = _rates(
            lambda: client.embeddings(encoding),  # noqa: B023 - runs in this turn
            client.infer_json,
            rounds,
        )
        cells = [encoding, f"{mine:,.0f}", f"{other:,.0f}", f"**{ratio:.2f}x**"]
        report.row(EMBEDDINGS, cells)


def _rates(mine: Measurement, other: Measurement, rounds: int) -> tuple[float, float, float]:
    """Returns the median requests per second of both, and the median ratio of the rounds."""
    pairs = [(mine().rate, other().rate) for _ in range(rounds)]
    first, second = (statistics.median(column) for column in zip(*pairs, strict=True))
    return first, second, statistics.median(one / two for one, two in pairs)


if __name__ == "__main__":
    main()
