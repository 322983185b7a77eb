"""A campaign of faults: what clients, models, the disk and the kernel may do to a running host.

Each fault happens while a witness, a second client in a process of its own, sends small requests.
For every fault three things are checked: the witness is served, the fault is answered as
documented, and the host gives back the memory, descriptors, processes and files that it took.

`make test` runs each fault once. `make faults SCALE=10` repeats many of them ten times, and runs
others with larger requests or more connections. It prints how long the witness waited, and fails if
its 99th percentile is above 50 ms.
"""
