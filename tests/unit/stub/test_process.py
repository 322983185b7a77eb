"""The set-up of a stub's process, and of the processes that its model forks."""

from __future__ import annotations

import subprocess
import sys

from tests.conftest import DEADLINE, ROOT

FORKS = """
import os, signal
from stub.process import ignore_stop_signals

ignore_stop_signals()
os.kill(os.getpid(), signal.SIGTERM)  # is ignored
for _ in range(200):
    child = os.fork()
    if child == 0:
        while True:
            signal.pause()
    os.kill(child, signal.SIGTERM)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == -signal.SIGTERM
assert signal.SIGTERM not in signal.pthread_sigmask(signal.SIG_BLOCK, [])
print("all ended")
"""


def test_a_forked_child_gets_sigterm_however_early_it_comes() -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORKS], cwd=ROOT, capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.stdout, done.stderr) == ("all ended\n", "")
