"""What the responses of a model add to choices: deltas, log probabilities, and pieces of texts."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host.frontends.openai.outputs import StopSearch, utf8_decoder


@given(st.lists(st.text("ab", max_size=4)), st.lists(st.text("ab", min_size=1), max_size=3))
def test_a_text_ends_before_the_first_stop_sequence(pieces: list[str], stops: list[str]) -> None:
    search = StopSearch(stops)
    found = "".join(map(search.feed, pieces)) + search.flush()
    whole = "".join(pieces)
    # The first piece that completes a stop sequence decides.
    for end in itertools.accumulate(map(len, pieces)):
        ends = [at for stop in stops if (at := whole[:end].find(stop)) >= 0]
        if ends:
            assert search.found and found == whole[: min(ends)]
            return
    assert not search.found and found == whole


def test_only_the_possible_start_of_a_stop_sequence_is_held_back() -> None:
    search = StopSearch(["STOP"])
    assert search.feed("abcS") == "abc"
    assert search.feed("T") == ""
    assert search.feed("x") == "STx"


@pytest.mark.parametrize("cut", range(len("aé漢😀".encode()) + 1))
def test_characters_are_complete_wherever_the_bytes_are_cut(cut: int) -> None:
    data = "aé漢😀".encode()
    decoder = utf8_decoder()
    first, second = decoder.decode(data[:cut]), decoder.decode(data[cut:], True)
    assert first + second == "aé漢😀"
    assert "\ufffd" not in first


def test_bytes_that_are_not_utf8_become_replacement_characters() -> None:
    assert utf8_decoder().decode(b"a\xff\xe6", True) == "a\ufffd\ufffd"
