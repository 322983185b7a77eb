"""Entry point of a stub process, started by path so that no folder of the user's can shadow it."""

import os
import sys

_here = os.path.dirname(os.path.abspath(__file__))
if sys.path and os.path.abspath(sys.path[0]) == _here:
    sys.path[0] = os.path.dirname(_here)

from stub.process import prepare  # noqa: E402
from stub.wire.spawn import Spawn  # noqa: E402
from stub.worker import Worker  # noqa: E402

if __name__ == "__main__":
    spawn = Spawn.load(sys.argv[1])
    prepare(spawn.title)
    worker = Worker(spawn)
    # The model sees the working directory first, then what is installed (pb_utils spec 1.2).
    sys.path[0] = ""
    sys.path.append(os.path.dirname(_here))
    worker.run()
