"""Starts a stub process: `__main__.py SPAWN`, or a fork server: `__main__.py --fork-server FD`.

A second descriptor, with a `PreloadJob`, makes the fork server prepare a model first.

It is started by path, so that no module of the user has precedence over it.
"""

import gc
import os
import sys

if __name__ == "__main__":  # not in the children of `multiprocessing`, which import this file
    _here = os.path.dirname(os.path.abspath(__file__))
    if getattr(sys.flags, "safe_path", False):
        sys.path.insert(0, _here)  # otherwise Python has done this
    sys.path[0] = os.path.dirname(_here)

    from stub.process import lead_process_group, set_up_stub_process
    from stub.wire.early_imports import import_dependencies

    lead_process_group()  # first: until then, signals of a terminal come here
    gc.disable()  # modules make hardly any garbage: collections only take time
    import_dependencies()

    from stub.stub_channel import ThreadsUnavailable
    from stub.wire.spawn import NO_THREADS_STATUS, SpawnArguments
    from stub.worker import Worker

    gc.enable()

    job = None
    if sys.argv[1] == "--fork-server":
        from stub.fork_server import run_fork_server
        from stub.preload import read_job

        job = read_job(int(sys.argv[3])) if len(sys.argv) > 3 else None
        if job is not None:
            sys.path[0] = ""  # as below, for the model that is imported now
            sys.path.append(os.path.dirname(_here))
        spawn = run_fork_server(int(sys.argv[2]), job)
    else:
        spawn = SpawnArguments.load(sys.argv[1])
    set_up_stub_process(spawn.process_title)
    try:
        worker = Worker(spawn)
    except ThreadsUnavailable:
        os._exit(NO_THREADS_STATUS)
    # A model sees the working directory first, then what is installed
    # (docs/reference/model-processes.md, "What an instance process inherits").
    sys.path[0] = ""
    if job is None:  # otherwise it is there already
        sys.path.append(os.path.dirname(_here))
    worker.run()
