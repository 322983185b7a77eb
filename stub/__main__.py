"""Entry point of stub processes, started by path so that no folder of the user's can shadow it.

`__main__.py SPAWN` is one stub; `__main__.py --fork-server FD` is the process that forks them.
"""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if not sys.path or os.path.realpath(sys.path[0]) != os.path.realpath(_here):
    sys.path.insert(0, _here)  # with PYTHONSAFEPATH, Python has not put it there
sys.path[0] = os.path.dirname(_here)

from stub.process import set_up_stub_process  # noqa: E402
from stub.wire.spawn import SpawnArguments  # noqa: E402
from stub.worker import Worker  # noqa: E402


def _spawn() -> SpawnArguments:
    if sys.argv[1] != "--fork-server":
        return SpawnArguments.load(sys.argv[1])
    from stub.fork_server import run_fork_server

    return run_fork_server(int(sys.argv[2]))


if __name__ == "__main__":
    spawn = _spawn()
    set_up_stub_process(spawn.process_title)
    worker = Worker(spawn)
    # The model sees the working directory first, then what is installed (pb_utils spec 1.2).
    sys.path[0] = ""
    sys.path.append(os.path.dirname(_here))
    worker.run()
