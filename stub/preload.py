"""Prepares a model once, in the process that its instances are then forked from."""

import os
import sys
import threading
from typing import List, Optional

import msgspec

from stub.user_model import ModelFailure, UserModel
from stub.wire.messages import ModelSource, PreloadJob

_prepared: Optional[UserModel] = None
_prepared_source: Optional[ModelSource] = None


def read_job(descriptor: int) -> PreloadJob:
    """Reads a job as JSON from a file, and closes it."""
    with open(descriptor, "rb") as file:
        return msgspec.json.decode(file.read(), type=PreloadJob)


def prepare_model(job: PreloadJob) -> None:
    """Imports a model and calls its `preload`, if it has one. Forks of this process have it.

    Raises ModelFailure, also if something is left behind that a fork does not get.
    """
    global _prepared, _prepared_source
    model = UserModel(job.source, "")
    model.preload(job.args)
    _check_forkable()
    _prepared, _prepared_source = model, job.source


def find_prepared_model(source: ModelSource) -> Optional[UserModel]:
    """The model that was prepared before this process was forked; None if there is none."""
    return _prepared if _prepared_source == source else None


def _check_forkable() -> None:
    """Raises ModelFailure if threads run, or if a GPU is in use. A fork gets neither."""
    main = threading.main_thread()
    names = [thread.name for thread in threading.enumerate() if thread is not main]
    if names:
        raise ModelFailure(
            f"preload has left threads running, which a forked instance does not get:"
            f" {', '.join(map(repr, sorted(names)))}. End them, or start them in 'initialize'"
        )
    gpus = find_open_gpus("/proc/self/fd")
    if gpus:
        raise ModelFailure(
            f"preload has initialised CUDA (it has {gpus[0]} open), which a forked instance cannot"
            " use. Load to the CPU in 'preload', and copy to the GPU in 'initialize'"
        )
    _end_pools()
    count = len(os.listdir("/proc/self/task"))
    if count > 1:
        raise ModelFailure(
            f"preload has left {count - 1} native threads running, which a forked instance does not"
            " get. Limit the library that has started them to one thread in 'preload'"
            " (OMP_NUM_THREADS=1, torch.set_num_threads(1)), or use it in 'initialize' only"
        )


def find_open_gpus(descriptors: str) -> List[str]:
    """The device files of NVIDIA GPUs that are open, by a folder of links like /proc/self/fd."""
    found = []
    for name in os.listdir(descriptors):
        try:
            target = os.readlink(os.path.join(descriptors, name))
        except OSError:  # the descriptor that lists the others
            continue
        if target.startswith("/dev/nvidia"):
            found.append(target)
    return sorted(found)


def _end_pools() -> None:
    """Lets libraries end their threads that know of forks, such as numpy's BLAS, by a fork."""
    sys.stdout.flush()
    sys.stderr.flush()
    pid = os.fork()
    if pid == 0:
        os._exit(0)
    os.waitpid(pid, 0)
