"""Memory that is freed, and given back to the system."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
import psutil
from stub.wire.heap import HeapTrimmer, tune_malloc

def private_bytes():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

tune_malloc()
trimmer = HeapTrimmer()
start = private_bytes()

def use():
    blocks = [b"a" * (1 << 20) for _ in range(200)]
    return bytes(1000)  # keeps the end of the heap

with ThreadPoolExecutor(1) as pool:
    {keep} = use(), pool.submit(use).result()
    grown = private_bytes() - start
    trimmer.trim()
    once = private_bytes() - start
    trimmer.trim()
print(grown >> 20, once >> 20, (private_bytes() - start) >> 20)
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


LATER = """
    del kept
    for _ in range(2):
        trimmer.trim()
"""


def test_memory_that_is_freed_after_a_trim_is_given_back_too() -> None:
    """What is in use while the heap is trimmed is not taken for what the process needs for good."""
    script = SCRIPT.replace("return bytes(1000)  # keeps the end of the heap", "return blocks")
    script = script.replace("{keep} = use(), pool.submit(use).result()", "kept = use()[::2]")
    script = script.replace("    trimmer.trim()\nprint", f"    trimmer.trim(){LATER}print")
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=120
    )
    _, once, left = map(int, done.stdout.split())
    assert once > 90
    assert left < 16


ONE_HEAP = """
import psutil
from stub.wire.heap import HeapTrimmer, tune_malloc

def private_bytes():
    memory = psutil.Process().memory_info()
    return memory.rss - memory.shared

tune_malloc(one_heap=True)
trimmer = HeapTrimmer()
start = private_bytes()
"""

AGAIN = f"""{ONE_HEAP}
blocks = [b"a" * (1 << 20) for _ in range(200)]
end = [bytes(1000) for _ in range(1000)]  # keeps the end of the heap
for _ in range(2):
    blocks = blocks or [b"a" * (1 << 20) for _ in range(190)]
    blocks.clear()
    grown = private_bytes() - start
    for _ in range(2):
        trimmer.trim()
    print(grown >> 20, (private_bytes() - start) >> 20)
"""


def test_memory_that_was_given_back_and_used_again_is_given_back_again() -> None:
    done = subprocess.run(
        [sys.executable, "-c", AGAIN], capture_output=True, text=True, check=True, timeout=120
    )
    first, again = done.stdout.splitlines()
    for line in (first, again):
        grown, left = map(int, line.split())
        assert grown > 100
        assert left < 16


LARGE = f"""{ONE_HEAP}
large = b"a" * (100 << 20)  # outside of the heap
blocks = [b"a" * (1 << 20) for _ in range(200)]
end = [bytes(1000) for _ in range(1000)]  # keeps the end of the heap
blocks.clear()
for _ in range(2):
    trimmer.trim()
del large
blocks = [b"a" * (1 << 20) for _ in range(90)]
blocks.clear()
for _ in range(2):
    trimmer.trim()
print((private_bytes() - start) >> 20)
"""


def test_a_large_block_that_is_in_use_during_a_trim_hides_nothing_later() -> None:
    done = subprocess.run(
        [sys.executable, "-c", LARGE], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 16


THREAD = f"""{ONE_HEAP}
from concurrent.futures import ThreadPoolExecutor

with ThreadPoolExecutor(1) as pool:
    pool.submit(lambda: len([b"a" * (1 << 20) for _ in range(55)])).result()
    for _ in range(2):
        trimmer.trim()
    print((private_bytes() - start) >> 20)
"""


def test_the_memory_of_a_thread_is_given_back() -> None:
    """A heap of its own would keep up to 64 MiB at its end."""
    done = subprocess.run(
        [sys.executable, "-c", THREAD], capture_output=True, text=True, check=True, timeout=120
    )
    assert int(done.stdout) < 16
