"""Whether the compiled lane is used, and what is told of it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from tests.conftest import DEADLINE, ROOT

FOUND = """
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec

import host  # it puts a finder of its own before others

others = sys.meta_path[:]

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.endswith("host.lane._lane"):
            if sys.argv[1] == "damaged":
                raise ImportError("file too short")
            return None if sys.argv[1] == "missing" else ModuleSpec(name, Old())
        specs = (other.find_spec(name, path, target) for other in others)
        return next((spec for spec in specs if spec is not None), None)

class Old(Loader):
    def exec_module(self, module):
        module.SOURCES = "of an older release"

sys.meta_path[:] = [Finder()]
from host import lane

print(lane.state, lane.header_reader, lane.message_reader)
"""


@pytest.mark.parametrize(
    ("lane", "text"),
    [
        ("missing", "not built"),
        ("damaged", "off (it cannot be loaded: file too short)"),
        (
            "old",
            "off (it cannot be loaded: it was built from other sources; run pip install again)",
        ),
    ],
)
def test_a_lane_that_cannot_be_used_is_left_out(lane: str, text: str) -> None:
    found = subprocess.run(
        [sys.executable, "-c", FOUND, lane],
        cwd=ROOT,
        env={**os.environ, "PBHOST_LANE": "1"},
        timeout=DEADLINE,
        capture_output=True,
        text=True,
    )
    assert (found.stdout, found.stderr) == (f"{text} None None\n", "")
