"""Memory that is freed, and given back to the system."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from stub.wire.heap import HeapTrimmer, _private_bytes, tune_malloc

tune_malloc()
trimmer = HeapTrimmer()
start = _private_bytes()

def use():
    blocks = [b"a" * (1 << 20) for _ in range(200)]
    return bytes(1000)  # keeps the end of the heap

with ThreadPoolExecutor(1) as pool:
    {keep} = use(), pool.submit(use).result()
    grown = _private_bytes() - start
    trimmer.trim()
    once = _private_bytes() - start
    trimmer.trim()
    trimmer.trim()
print(grown >> 20, once >> 20, (_private_bytes() - start) >> 20)
"""


def test_memory_that_stays_free_is_given_back_at_the_second_call() -> None:
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.format(keep="kept")],
        capture_output=True,
        text=True,
        check=True,
        timeout=120,
    )
    grown, once, left = map(int, done.stdout.split())
    assert grown >= once > 100
    assert left < 16


def test_a_process_without_descriptors_goes_on() -> None:
    script = (
        "import resource\n"
        "from stub.wire.heap import HeapTrimmer\n"
        "trimmer = HeapTrimmer()\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (0, 0))\n"
        "trimmer.trim()\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=120)
