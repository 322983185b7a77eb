"""A frontend process: accepts connections, speaks to the core, and has few rights."""

from __future__ import annotations

import subprocess
import sys

from host.frontend_processes.core_link import OUT_OF_MEMORY_STATUS

DEADLINE = 60

SERVE = """
import asyncio
import logging
import sys
from host.frontend_processes.frontend_process import CoreLogHandler
from host.frontends.http1.cycle import RequestResponseCycle

async def app(scope, receive, send):
    bytearray(1 << 60)

for name in ("pbhost.host.core", "pbhost.host.instances.instance", "zmq"):
    assert name not in sys.modules, name  # megabytes in each process
logging.getLogger("pbhost").addHandler(CoreLogHandler(None))
asyncio.run(RequestResponseCycle(None, {}, True, False).run(app))
"""


def test_an_http_request_without_memory_ends_the_process() -> None:
    ended = subprocess.run(
        [sys.executable, "-c", SERVE], capture_output=True, text=True, timeout=DEADLINE
    )
    assert ended.returncode == OUT_OF_MEMORY_STATUS
    assert ended.stderr == "pbhost-frontend: out of memory\n"
