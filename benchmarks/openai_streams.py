"""Measures streams of the OpenAI routes against `generate_stream`, with the same model.

    python -m benchmarks.openai_streams [--rounds N] [--seconds S] [--keep]

One server answers both in turns, so a disturbance affects both; h2load reads the streams. `--keep`
writes the rows into docs/explanation/performance.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
from pathlib import Path

from benchmarks.h2load import JSON, h2load
from benchmarks.page import Report
from benchmarks.servers import RunningServer, ours

REPOSITORY = Path(__file__).resolve().with_name("repository")
HEADINGS = ("streams at once", "chunks/s: /v1/completions", "generate_stream", "ratio")
CHUNKS = 200  # of one stream

_MODEL = "repeat_text"
_PATHS = {
    "/v1/completions": {"model": _MODEL, "prompt": str(CHUNKS), "stream": True},
    f"/v2/models/{_MODEL}/generate_stream": {"text_input": str(CHUNKS)},
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported")
    parser.add_argument("--seconds", type=float, default=3, help="of each measurement")
    parser.add_argument("--keep", action="store_true", help="write the rows into the page")
    arguments = parser.parse_args()
    report = Report(arguments.keep)
    with ours(REPOSITORY) as server:
        for streams in (1, 16, 64):
            pairs = [
                [measure(server, path, streams, arguments.seconds) for path in _PATHS]
                for _ in range(arguments.rounds)
            ]
            openai, generate = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(mine / other for mine, other in pairs)
            row = [str(streams), f"{openai:,.0f}", f"{generate:,.0f}", f"**{ratio:.2f}x**"]
            report.row(HEADINGS, row)


def measure(server: RunningServer, path: str, streams: int, seconds: float) -> float:
    """Return the chunks per second of all streams together."""
    body = json.dumps(_PATHS[path]).encode()
    url = f"http://127.0.0.1:{server.http_port}{path}"
    return h2load(url, body, JSON, streams, seconds).rate * CHUNKS


if __name__ == "__main__":
    main()
