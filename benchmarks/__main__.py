"""Measures this host and other servers in one run, with the same models, and prints ratios.

    python -m benchmarks [--peer FOLDER] [--rounds N] [--only NAME] [--engine grpcio] [--keep]
    python -m benchmarks --rivals FOLDER [--rounds N] [--only NAME] [--keep]

The first form compares with Triton, the second with MLServer and LitServe. All servers run for the
whole time and are loaded in turns, so a disturbance affects all of them. `--keep` writes each row
into docs/explanation/performance.md and draws docs/explanation/performance.svg again.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

from benchmarks.bls import BLS_LOADS, BlsLoad, BlsMeasurement, measure_bls, median
from benchmarks.differing import DIFFERING_LOADS, DifferingMeasurement, measure_differing
from benchmarks.load import Load, Measurement, measure
from benchmarks.page import Report
from benchmarks.peer import Peer
from benchmarks.plot import draw
from benchmarks.rivals import compare_rivals
from benchmarks.rows import INSTANCE_LOADS, LOADS
from benchmarks.servers import RunningServer, ours, theirs
from benchmarks.streams import many_streams, one_stream

REPOSITORY = Path(__file__).resolve().with_name("repository")
MANY_INSTANCES = REPOSITORY.with_name("many_instances")

HEADINGS = (
    *("work", "requests/s: ours", "peer", "ratio", "p50 µs: ours", "peer", "p99 µs: ours", "peer"),
    *("host CPU µs/request: ours", "peer", "with stubs: ours", "peer"),
)
INSTANCES = ("instances", *HEADINGS[1:])
BATCHES = ("dynamic batching", "mean batch: ours", "peer")
BLS = (
    *("BLS", "responses/s: ours", "peer", "ratio", "host CPU µs/response: ours", "peer"),
    *("with stubs: ours", "peer"),
)
DIFFERING = (
    *("requests that differ", "host CPU µs/request: ours", "peer", "ratio"),
    *("stubs CPU: ours", "peer", "requests/s: ours", "peer", "p99 µs: ours", "peer"),
)
STREAMS = ("streams", "ours", "peer", "ratio")
START = ("20 instances", "ours", "peer", "ratio")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    scratch = Path(tempfile.gettempdir(), "triton-peer")
    parser.add_argument("--peer", type=Path, default=scratch, metavar="FOLDER")
    parser.add_argument(
        "--rivals", type=Path, metavar="FOLDER", help="folder with MLServer and LitServe"
    )
    parser.add_argument("--rounds", type=int, default=3, help="rounds; the median is reported")
    parser.add_argument("--seconds", type=float, default=2, help="per window; a round has 3")
    parser.add_argument("--only", default="", help="run only rows with this text in the name")
    parser.add_argument("--engine", default="h2", help="the gRPC engine of this host")
    parser.add_argument(
        "--keep", action="store_true", help="write rows into docs/explanation/performance.md"
    )
    arguments = parser.parse_args()
    report = Report(arguments.keep)
    if arguments.rivals:
        compare_rivals(
            arguments.rivals, report, arguments.only, arguments.rounds, arguments.seconds
        )
    else:
        peer = Peer(arguments.peer)
        peer.install()
        rows = {name: load for name, load in LOADS.items() if arguments.only in name}
        if rows:
            compare(peer, arguments.engine, rows, arguments.rounds, arguments.seconds, report)
        rows = {name: load for name, load in INSTANCE_LOADS.items() if arguments.only in name}
        if rows:
            compare_instances(
                peer, arguments.engine, rows, arguments.rounds, arguments.seconds, report
            )
        calls = {name: load for name, load in BLS_LOADS.items() if arguments.only in name}
        if calls:
            compare_bls(peer, arguments.engine, calls, arguments.rounds, report)
        differing = [name for name in DIFFERING_LOADS if arguments.only in name]
        if differing:
            compare_differing(peer, arguments.engine, differing, arguments.rounds, report)
        if arguments.only in "streams":
            compare_streams(peer, arguments.engine, arguments.rounds, report)
        if arguments.only in "start-up":
            compare_start(peer, arguments.rounds, report)
    if arguments.keep:
        draw()


def compare(
    peer: Peer, engine: str, rows: dict[str, Load], rounds: int, seconds: float, report: Report
) -> None:
    """Prints the table of loads and the table of batch sizes."""
    batches = {}
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        for name, load in rows.items():
            mine, other = _measure_pairs(peer, load, host, rival, rounds, seconds)
            report.row(HEADINGS, cells(name, mine, other))
            if load.model == "identity_batched":
                batches[name.removeprefix("dynamic batching, ")] = mine.batch, other.batch
    for name, sizes in batches.items():
        report.row(BATCHES, [name, *(f"{size:.1f}" for size in sizes)])


def compare_instances(
    peer: Peer, engine: str, rows: dict[str, Load], rounds: int, seconds: float, report: Report
) -> None:
    """Prints the table of models with several instances."""
    with ours(MANY_INSTANCES, engine) as host, theirs(MANY_INSTANCES, peer) as rival:
        for name, load in rows.items():
            mine, other = _measure_pairs(peer, load, host, rival, rounds, seconds)
            report.row(INSTANCES, cells(name, mine, other))


def _measure_pairs(
    peer: Peer, load: Load, host: RunningServer, rival: RunningServer, rounds: int, seconds: float
) -> tuple[Measurement, Measurement]:
    """Loads the servers in turns; returns the median round of each."""
    pairs = [
        [
            measure(peer, load, server, seconds)
            for server in ((host, rival) if turn % 2 else (rival, host))
        ][:: 1 if turn % 2 else -1]
        for turn in range(rounds)
    ]
    return _median(pairs, 0), _median(pairs, 1)


def cells(name: str, mine: Measurement, other: Measurement) -> list[str]:
    """Formats one row of the table of loads."""
    row = [name, f"{mine.rate:,.0f}", f"{other.rate:,.0f}", f"**{mine.rate / other.rate:.2f}x**"]
    for what in ("p50", "p99", "host_cpu", "all_cpu"):
        row += [f"{getattr(mine, what):,.0f}", f"{getattr(other, what):,.0f}"]
    return row


def _median(pairs: list[list[Measurement]], side: int) -> Measurement:
    ordered = sorted((pair[side] for pair in pairs), key=lambda m: m.rate)
    return ordered[len(ordered) // 2]


def compare_bls(
    peer: Peer, engine: str, loads: dict[str, BlsLoad], rounds: int, report: Report
) -> None:
    """Prints the table of calls of models to other models."""
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        for name, load in loads.items():
            pairs = [[measure_bls(server, load) for server in (host, rival)] for _ in range(rounds)]
            mine, other = (median([pair[side] for pair in pairs]) for side in (0, 1))
            report.row(BLS, bls_cells(name, mine, other))


def bls_cells(name: str, mine: BlsMeasurement, other: BlsMeasurement) -> list[str]:
    """Formats one row of the table of calls of models to other models."""
    row = [name, f"{mine.rate:,.0f}", f"{other.rate:,.0f}", f"**{mine.rate / other.rate:.2f}x**"]
    for what in ("host_cpu", "all_cpu"):
        row += [f"{getattr(mine, what):,.0f}", f"{getattr(other, what):,.0f}"]
    return row


def compare_differing(
    peer: Peer, engine: str, names: list[str], rounds: int, report: Report, requests: int = 6000
) -> None:
    """Prints the table of requests of which no two are alike."""
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        for name in names:
            pairs = [
                [measure_differing(server, name, requests) for server in (host, rival)]
                for _ in range(rounds)
            ]
            report.row(DIFFERING, differing_cells(name, pairs))


def differing_cells(name: str, pairs: list[list[DifferingMeasurement]]) -> list[str]:
    """Formats one row of the table of requests that differ: medians, also of the ratios."""

    def medians(what: str) -> list[str]:
        return [
            f"{statistics.median(getattr(pair[side], what) for pair in pairs):,.0f}"
            for side in (0, 1)
        ]

    ratio = statistics.median(mine.host_cpu / other.host_cpu for mine, other in pairs)
    row = [name, *medians("host_cpu"), f"**{ratio:.2f}x**"]
    for what in ("stubs_cpu", "rate", "p99"):
        row += medians(what)
    return row


def compare_streams(peer: Peer, engine: str, rounds: int, report: Report) -> None:
    """Measures how fast the official Python client receives the responses of a decoupled model."""
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        long = [[one_stream(server, 20_000) for server in (host, rival)] for _ in range(rounds)]
        many = [many_streams(server, 500, 20) for server in (host, rival)]
    rates, firsts, gaps = (
        [statistics.median(getattr(pair[side], what) for pair in long) for side in (0, 1)]
        for what in ("rate", "first", "p99")
    )
    for what, (mine, other), form in (
        ("responses/s, one stream of 20,000", rates, ",.0f"),
        ("µs from one of these to the next, p99", gaps, ",.0f"),
        ("ms to its first response", firsts, ".2f"),
        ("responses/s, 500 requests of 20 at once", [one.rate for one in many], ",.0f"),
    ):
        ratio = f"**{mine / other:.2f}x**"
        report.row(STREAMS, [what, f"{mine:{form}}", f"{other:{form}}", ratio])
    for what in ("memory_before", "memory_after"):
        mine, other = (getattr(one, what) for one in many)
        name = f"server MB {what.split('_')[1]} the second time"
        report.row(STREAMS, [name, f"{mine:.0f}", f"{other:.0f}", ""])


def compare_start(peer: Peer, rounds: int, report: Report) -> None:
    """Measures the start-up of 20 instances and the memory of an idle stub."""
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder, "twenty")
        source = REPOSITORY / "identity_fp32"
        Path(model, "1").mkdir(parents=True)
        Path(model, "1", "model.py").write_text((source / "1" / "model.py").read_text())
        config = (source / "config.pbtxt").read_text().replace("count: 1", "count: 20")
        Path(model, "config.pbtxt").write_text(config)
        starts = {
            "ours": [_start(lambda: ours(Path(folder))) for _ in range(rounds)],
            "peer": [_start(lambda: theirs(Path(folder), peer)) for _ in range(rounds)],
        }
    for index, what in enumerate(("seconds from start to ready", "MB PSS per idle stub")):
        mine, other = (
            statistics.median(start[index] for start in starts[who]) for who in ("ours", "peer")
        )
        report.row(START, [what, f"{mine:.2f}", f"{other:.2f}", f"{mine / other:.2f}"])


def _start(server: Callable[[], AbstractContextManager[object]]) -> tuple[float, float]:
    with server() as running:
        assert isinstance(running, RunningServer)
        return running.seconds, statistics.mean(running.stub_megabytes())


if __name__ == "__main__":
    main()
