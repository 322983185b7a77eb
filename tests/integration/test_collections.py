"""Collections of garbage in a host: short, as they look only at what requests have made."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np

from tests.clients import tensor
from tests.conftest import RepositoryBuilder, Serve

COUNTER = """
import gc, signal

def tell(number, frame):
    print(f"a collection looks at {len(gc.get_objects())} objects", flush=True)

signal.signal(signal.SIGUSR1, tell)
"""


def test_the_garbage_collector_skips_imported_objects(
    repository: RepositoryBuilder, serve: Serve, tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text(COUNTER)
    repository.copy("identity")
    host = serve(repository, env={"PYTHONPATH": str(tmp_path)}).wait_started()
    with host.client() as client:
        client.infer("identity", [tensor("INPUT0", np.ones(4, np.float32))])
    host.process.send_signal(signal.SIGUSR1)
    told = host.wait_for(r"a collection looks at (\d+) objects")
    assert int(told[1]) < 30_000
