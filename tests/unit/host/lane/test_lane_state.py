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

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.endswith("host.lane._lane"):
            if sys.argv[1] == "damaged":
                raise ImportError("file too short")
            return ModuleSpec(name, Old())

class Old(Loader):
    def exec_module(self, module):
        module.SOURCES = "of an older release"

sys.meta_path.insert(0, Finder())
from host import lane

print(lane.state, lane.header_reader, lane.message_reader)
"""


@pytest.mark.parametrize(
    ("lane", "text"),
    [
        ("damaged", "file too short"),
        ("old", "it was built from other sources; run pip install again"),
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
    assert (found.stdout, found.stderr) == (f"off (it cannot be loaded: {text}) None None\n", "")
