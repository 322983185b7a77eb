"""Whether the compiled lane is used, and what is told of it."""

from __future__ import annotations

import os
import subprocess
import sys

from tests.conftest import DEADLINE, ROOT

DAMAGED = """
import sys
from importlib.abc import MetaPathFinder

import host  # it puts a finder of its own before others

class Finder(MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name.endswith("host.lane._lane"):
            raise ImportError("file too short")

sys.meta_path.insert(0, Finder())
from host import lane

print(lane.state, lane.header_reader, lane.message_reader)
"""


def test_a_lane_that_cannot_be_loaded_is_left_out() -> None:
    found = subprocess.run(
        [sys.executable, "-c", DAMAGED],
        cwd=ROOT,
        env={**os.environ, "PBHOST_LANE": "1"},
        timeout=DEADLINE,
        capture_output=True,
        text=True,
    )
    assert (found.stdout, found.stderr) == (
        "off (it cannot be loaded: file too short) None None\n",
        "",
    )
