"""Which modules a statement imports in a new process."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable

from tests.conftest import DEADLINE


def imported_by(statement: str, modules: Iterable[str]) -> set[str]:
    """Those of the modules that are loaded after the statement. The statement prints nothing."""
    code = f"import sys\n{statement}\nprint(*({set(modules)!r} & set(sys.modules)))"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=DEADLINE
    )
    assert (done.returncode, done.stderr) == (0, "")
    return set(done.stdout.split())
