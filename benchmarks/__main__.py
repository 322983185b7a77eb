"""Measures this host and a real Triton in one run, on the same models, and prints ratios.

    python -m benchmarks [--peer FOLDER] [--rounds N] [--only NAME] [--engine grpcio]

Both servers run all the time and are loaded in turns, so that what disturbs one disturbs both.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

from benchmarks.load import Load, Measurement, measure
from benchmarks.peer import Peer
from benchmarks.servers import RunningServer, ours, theirs
from benchmarks.streams import many_streams, one_stream

REPOSITORY = Path(__file__).with_name("repository")

LOADS = {
    "identity FP32[16], concurrency 1": Load("identity_fp32", 16, 1),
    "identity FP32[16], concurrency 4": Load("identity_fp32", 16, 4),
    "identity FP32[16], concurrency 16": Load("identity_fp32", 16, 16),
    "identity FP32[1048576] (4 MB), concurrency 1": Load("identity_fp32", 1 << 20, 1),
    "the same in system shared memory, concurrency 1": Load("identity_fp32", 1 << 20, 1, True),
    "the same in system shared memory, concurrency 4": Load("identity_fp32", 1 << 20, 4, True),
    "HTTP identity FP32[16], concurrency 1": Load("identity_fp32", 16, 1, http=True),
    "HTTP identity FP32[16], concurrency 16": Load("identity_fp32", 16, 16, http=True),
    "BLS to identity FP32[16], concurrency 1": Load("bls_identity", 16, 1),
    "BLS to identity FP32[16], concurrency 16": Load("bls_identity", 16, 16),
    "ten BLS calls of 4 MB per request, concurrency 1": Load("bls_large", 16, 1),
    "BLS to identity, 4 MB, concurrency 1": Load("bls_identity", 1 << 20, 1),
    "BLS to identity, 4 MB in system shared memory, concurrency 1": Load(
        "bls_identity", 1 << 20, 1, True
    ),
}

THREE = "ensemble of three identities"
LOADS |= {
    f"{THREE}, FP32[16], concurrency 1": Load("ensemble_identity", 16, 1),
    f"{THREE}, FP32[16], concurrency 16": Load("ensemble_identity", 16, 16),
    f"{THREE}, 4 MB, concurrency 1": Load("ensemble_identity", 1 << 20, 1),
}

HEADER = (
    "| work | requests/s: ours | peer | ratio | p50 µs: ours | peer | p99 µs: ours | peer"
    " | host CPU µs/request: ours | peer | with stubs: ours | peer |"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--peer", type=Path, default=Path(tempfile.gettempdir(), "triton-peer"), metavar="FOLDER"
    )
    parser.add_argument("--rounds", type=int, default=3, help="the median round is reported")
    parser.add_argument("--only", default="", help="only rows whose name contains this")
    parser.add_argument("--engine", default="h2", help="the gRPC engine of our host")
    arguments = parser.parse_args()
    peer = Peer(arguments.peer)
    peer.install()
    rows = {name: load for name, load in LOADS.items() if arguments.only in name}
    if rows:
        compare(peer, arguments.engine, rows, arguments.rounds)
    if arguments.only in "streams":
        compare_streams(peer, arguments.engine, arguments.rounds)
    if arguments.only in "start-up":
        compare_start(peer, arguments.rounds)


def compare(peer: Peer, engine: str, rows: dict[str, Load], rounds: int) -> None:
    """Print the table of loads."""
    print(HEADER)
    print("|---" * (HEADER.count("|") - 1) + "|")
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        for name, load in rows.items():
            pairs = [
                [
                    measure(peer, load, server)
                    for server in ((host, rival) if turn % 2 else (rival, host))
                ][:: 1 if turn % 2 else -1]
                for turn in range(rounds)
            ]
            print(row(name, _median(pairs, 0), _median(pairs, 1)))
            sys.stdout.flush()


def row(name: str, mine: Measurement, other: Measurement) -> str:
    """One line of the table."""
    cells = [name, f"{mine.rate:,.0f}", f"{other.rate:,.0f}", f"**{mine.rate / other.rate:.2f}x**"]
    for what in ("p50", "p99", "host_cpu", "all_cpu"):
        cells += [f"{getattr(mine, what):,.0f}", f"{getattr(other, what):,.0f}"]
    return "| " + " | ".join(cells) + " |"


def _median(pairs: list[list[Measurement]], side: int) -> Measurement:
    ordered = sorted((pair[side] for pair in pairs), key=lambda m: m.rate)
    return ordered[len(ordered) // 2]


def compare_streams(peer: Peer, engine: str, rounds: int) -> None:
    """Print how fast the official Python client gets a decoupled model's responses."""
    with ours(REPOSITORY, engine) as host, theirs(REPOSITORY, peer) as rival:
        long = [[one_stream(server, 20_000) for server in (host, rival)] for _ in range(rounds)]
        many = [many_streams(server, 500, 20) for server in (host, rival)]
    rates, firsts = (
        [statistics.median(getattr(pair[side], what) for pair in long) for side in (0, 1)]
        for what in ("rate", "first")
    )
    print("\n| streams | ours | peer | ratio |\n|---|---|---|---|")
    for what, (mine, other), form in (
        ("responses/s, one stream of 20,000", rates, ",.0f"),
        ("ms to its first response", firsts, ".2f"),
        ("responses/s, 500 requests of 20 at once", [one.rate for one in many], ",.0f"),
    ):
        print(f"| {what} | {mine:{form}} | {other:{form}} | **{mine / other:.2f}x** |")
    for what in ("memory_before", "memory_after"):
        mine, other = (getattr(one, what) for one in many)
        print(f"| server MB {what.split('_')[1]} the second time | {mine:.0f} | {other:.0f} | |")


def compare_start(peer: Peer, rounds: int) -> None:
    """Print how long 20 instances take to be ready, and what an idle stub weighs."""
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
    print("\n| 20 instances | ours | peer | ratio |\n|---|---|---|---|")
    for index, what in enumerate(("seconds from start to ready", "MB PSS per idle stub")):
        mine, other = (
            statistics.median(start[index] for start in starts[who]) for who in ("ours", "peer")
        )
        print(f"| {what} | {mine:.2f} | {other:.2f} | {mine / other:.2f} |")


def _start(server: Callable[[], object]) -> tuple[float, float]:
    with server() as running:  # type: ignore[attr-defined]
        assert isinstance(running, RunningServer)
        return running.seconds, statistics.mean(running.stub_megabytes())


if __name__ == "__main__":
    main()
