"""Counts the primes below `LIMIT` in pieces, and sends a response after each piece.

Before every piece it checks whether the request is cancelled. Its temporary files are removed in
every case.
"""

import os
import tempfile

import numpy as np

import triton_python_backend_utils as pb_utils

FINAL = pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL
PIECE = 1 << 20


def sieve(start, end, primes):
    """Which numbers from `start` to below `end` have no divisor in `primes` except themselves."""
    found = np.ones(end - start, dtype=bool)
    for prime in primes:
        first = max(prime * prime, -(-start // prime) * prime)
        found[first - start :: prime] = False
    return found


def primes_below(end):
    """The primes below a small limit, as a list."""
    if end <= 2:
        return []
    return [int(n) + 2 for n in np.flatnonzero(sieve(2, end, primes_below(int(end**0.5) + 1)))]


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            limit = int(pb_utils.get_input_tensor_by_name(request, "LIMIT").as_numpy()[0])
            with tempfile.TemporaryDirectory(prefix="long_job-") as scratch:
                done = self.count(limit, sender, scratch)
            if done < limit:
                pb_utils.Logger.log_info(f"cancelled at {done} of {limit}, scratch files removed")
            sender.send(flags=FINAL)  # ends the request, also after a cancellation

    def count(self, limit, sender, scratch):
        """Count, send progress, and return how far it got."""
        primes = primes_below(int(limit**0.5) + 1)
        total = 0
        for start in range(2, limit, PIECE):
            if sender.is_cancelled():
                return start
            end = min(start + PIECE, limit)
            found = sieve(start, end, primes)
            np.save(os.path.join(scratch, "piece.npy"), found)
            total += int(found.sum())
            outputs = [
                pb_utils.Tensor("DONE", np.array([end / limit])),
                pb_utils.Tensor("PRIMES", np.array([total])),
            ]
            sender.send(pb_utils.InferenceResponse(outputs))
        return limit
