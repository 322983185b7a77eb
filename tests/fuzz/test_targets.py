"""The targets with what hypothesis makes of their seeds: a few seconds of the same search."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.fuzz import codec_target, frames_target, h2_target, http_target

TARGETS = {"codec": codec_target, "frames": frames_target, "h2": h2_target, "http": http_target}


@pytest.mark.parametrize("name", TARGETS)
def test_fuzzing_seeds_pass(name: str) -> None:
    for seed in TARGETS[name].SEEDS:
        TARGETS[name].check(seed)


@pytest.mark.parametrize("name", TARGETS)
@given(st.data())
@settings(max_examples=200, deadline=None, suppress_health_check=list(HealthCheck))
def test_random_inputs_keep_the_invariants(name: str, data: Any) -> None:
    seeds = st.sampled_from(TARGETS[name].SEEDS)
    part = st.tuples(seeds, st.integers(0, 300), st.integers(0, 300), st.binary(max_size=8)).map(
        lambda made: made[0][: made[1]] + made[3] + made[0][made[2] :]
    )
    TARGETS[name].check(data.draw(st.binary(max_size=100) | part))
