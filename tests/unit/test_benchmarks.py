"""Results of benchmarks: tables, picture, memory growth; and the cost of the sequence scheduler."""

from __future__ import annotations

import asyncio
import math
import sys
from types import FrameType
from xml.etree import ElementTree

import pytest

from benchmarks.__main__ import BATCHES, BLS, DIFFERING, HEADINGS, INSTANCES, START, STREAMS
from benchmarks.bls import BLS_LOADS
from benchmarks.differing import DIFFERING_LOADS
from benchmarks.h2load import summarize
from benchmarks.memory import Sample, slope, summary
from benchmarks.page import PAGE, table_row, tables, with_row
from benchmarks.plot import PICTURE, chart, ratios
from benchmarks.rivals import RIVALS, rows
from benchmarks.rows import INSTANCE_LOADS, LOADS
from benchmarks.sequences import requests

TEXT = """# Figures

| work | requests/s: ours | peer | ratio |
|---|---|---|---|
| one | 10 | 5 | **2.00x** |
| two | – | – | – |

And then

| streams | ours | peer | ratio |
|---|---|---|---|
| responses/s, one stream | 1 | 4 | **0.25x** |
| ms to the first response | 1 | 2 | **0.50x** |

| work | requests/s: ours | Other | ratio |
|---|---|---|---|
| `one` | 8 | 1 | **8.00x** |
"""


def test_a_measured_row_replaces_the_row_with_the_same_name() -> None:
    headings = ("work", "requests/s: ours", "peer", "ratio")
    changed = with_row(TEXT, headings, ("two", "3", "3", "**1.00x**"))
    assert changed == TEXT.replace("| two | – | – | – |", "| two | 3 | 3 | **1.00x** |")


def test_a_new_row_becomes_the_last_one_of_its_table() -> None:
    headings = ("streams", "ours", "peer", "ratio")
    changed = with_row(TEXT, headings, ("more", "1", "1", ""))
    last = "| ms to the first response | 1 | 2 | **0.50x** |\n"
    assert changed == TEXT.replace(last, f"{last}| more | 1 | 1 |  |\n")


def test_a_row_for_an_unknown_table_is_refused() -> None:
    with pytest.raises(ValueError, match=r"performance.md has no table .* \| new \|"):
        with_row(TEXT, ("new",), ("one",))


def test_the_picture_shows_the_measured_rates() -> None:
    assert ratios(TEXT) == {"one": 2.0, "responses/s, one stream": 0.25, "Other: one": 8.0}


def test_bar_lengths_are_proportional_to_the_logarithm_of_the_ratio() -> None:
    picture = ElementTree.fromstring(chart({"a<b": 2.0, "c": 0.25, "d": 8.0}))
    elements = [(each.tag.rpartition("}")[2], each) for each in picture]
    assert "a<b" in [each.text for tag, each in elements if tag == "text"]
    bars = [each.attrib for tag, each in elements if tag == "rect"][-3:]
    first, second, third = (
        (float(bar["x"]), float(bar["x"]) + float(bar["width"])) for bar in bars
    )
    assert first[0] == pytest.approx(second[1], abs=0.2) == third[0]
    unit = first[1] - first[0]
    assert second[1] - second[0] == pytest.approx(2 * unit, abs=0.2)
    assert third[1] - third[0] == pytest.approx(3 * unit, abs=0.2)


def test_the_picture_matches_the_page() -> None:
    text = PAGE.read_text()
    assert f"({PICTURE.name})" in text
    drawn = PICTURE.read_text()
    assert drawn == chart(ratios(text)), "draw it again: python -m benchmarks.plot"


@pytest.mark.parametrize(
    ("headings", "names"),
    [
        (HEADINGS, list(LOADS)),
        (INSTANCES, list(INSTANCE_LOADS)),
        (DIFFERING, list(DIFFERING_LOADS)),
        (BLS, list(BLS_LOADS)),
        (BATCHES, [f"FP32[16], concurrency {count}" for count in (1, 16, 64)]),
        *((rival.headings, list(rows(rival))) for rival in RIVALS),
    ],
    ids=["loads", "instances", "differing", "bls", "batches", *(rival.name for rival in RIVALS)],
)
def test_the_page_has_exactly_the_rows_of_the_benchmark(
    headings: tuple[str, ...], names: list[str]
) -> None:
    (table,) = (each for each in tables(PAGE.read_text()) if each[0] == list(headings))
    assert [row[0] for row in table[1:]] == names
    assert {len(row) for row in table} == {len(headings)}


@pytest.mark.parametrize("headings", [STREAMS, START], ids=["streams", "start"])
def test_the_page_has_tables_for_batches_streams_and_start(headings: tuple[str, ...]) -> None:
    assert f"{table_row(headings)}\n" in PAGE.read_text()


def test_percentiles_are_computed_over_the_requests() -> None:
    found = summarize(list(range(101)), 2.0)
    assert (found.rate, found.p50, found.p99) == (50.5, 50, 99)


def test_growth_is_measured_over_the_last_two_thirds() -> None:
    minutes = [0.5 * index for index in range(1, 21)]
    settles = [100.0 if minute < 3 else 200.0 for minute in minutes]
    assert slope(minutes, settles) == pytest.approx(0)
    assert slope(minutes, [2 * minute for minute in minutes]) == pytest.approx(2)


def test_the_summary_has_start_end_maximum_and_growth_of_memory() -> None:
    samples = [Sample(minute, minute, 9 - minute, 0, 0, 3, 3) for minute in (1, 2, 3)]
    found = {name: figures for name, *figures in summary(samples)}
    assert found["host MB PSS"] == ["1.0", "3.0", "3.0", "+1.000"]
    assert found["host MB RSS"] == ["8.0", "6.0", "8.0", "-1.000"]


async def _calls(live: int, waiting: bool) -> float:
    """Functions called per request, in Python or C."""
    steps, count = requests(live, waiting), 0

    def called(frame: FrameType, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(called)
    try:
        done = steps(300)
    finally:
        sys.setprofile(before)
    return count / done


@pytest.mark.parametrize("waiting", [False, True], ids=["slots", "backlog"])
def test_work_per_request_grows_at_most_with_the_logarithm_of_live_sequences(
    waiting: bool,
) -> None:
    few, many = (asyncio.run(_calls(live, waiting)) for live in (100, 5_000))
    assert few > 10
    assert many <= few * math.log(5_000) / math.log(100)
