"""The loads of the table, which every server gets."""

from __future__ import annotations

from benchmarks.load import Load

MEGABYTES = 1 << 20  # elements: 4 MB
IMAGE = 150_528  # elements: 602 kB, 3 x 224 x 224

THREE = "ensemble of three identities"

LOADS = {
    "identity FP32[16], concurrency 1": Load("identity_fp32", 16, 1),
    "identity FP32[16], concurrency 4": Load("identity_fp32", 16, 4),
    "identity FP32[16], concurrency 16": Load("identity_fp32", 16, 16),
    "identity FP32[16], concurrency 64": Load("identity_fp32", 16, 64),
    "the same by `h2load -m 1`, 1 connection": Load("identity_fp32", 16, 1, by_h2load=True),
    "the same by `h2load -m 1`, 16 connections": Load("identity_fp32", 16, 16, by_h2load=True),
    "dynamic batching, FP32[16], concurrency 1": Load("identity_batched", 16, 1),
    "dynamic batching, FP32[16], concurrency 16": Load("identity_batched", 16, 16),
    "dynamic batching, FP32[16], concurrency 64": Load("identity_batched", 16, 64),
    "identity FP32[16] on a stream, concurrency 1": Load("identity_fp32", 16, 1, streaming=True),
    "identity FP32[16] on a stream, concurrency 16": Load("identity_fp32", 16, 16, streaming=True),
    "identity FP32[4096] (16 kB), concurrency 1": Load("identity_fp32", 4096, 1),
    "identity FP32[4096] (16 kB), concurrency 16": Load("identity_fp32", 4096, 16),
    "identity FP32[16384] (66 kB) in system shared memory, concurrency 8": Load(
        "identity_fp32", 16384, 8, True
    ),
    "identity FP32[150528] (602 kB), concurrency 1": Load("identity_fp32", IMAGE, 1),
    "identity FP32[150528] (602 kB), concurrency 4": Load("identity_fp32", IMAGE, 4),
    "identity FP32[1048576] (4 MB), concurrency 1": Load("identity_fp32", MEGABYTES, 1),
    "the same in system shared memory, concurrency 1": Load("identity_fp32", MEGABYTES, 1, True),
    "the same in system shared memory, concurrency 4": Load("identity_fp32", MEGABYTES, 4, True),
    "HTTP identity FP32[16], concurrency 1": Load("identity_fp32", 16, 1, http=True),
    "HTTP identity FP32[16], concurrency 16": Load("identity_fp32", 16, 16, http=True),
    "HTTP identity FP32[16] as JSON by `h2load`, 1 connection": Load(
        "identity_fp32", 16, 1, http=True, by_h2load=True
    ),
    "HTTP identity FP32[16] as JSON by `h2load`, 16 connections": Load(
        "identity_fp32", 16, 16, http=True, by_h2load=True
    ),
    "HTTP identity FP32[1000] as JSON by `h2load`, 1 connection": Load(
        "identity_fp32", 1000, 1, http=True, by_h2load=True
    ),
    "HTTP identity FP32[1000] as JSON by `h2load`, 16 connections": Load(
        "identity_fp32", 1000, 16, http=True, by_h2load=True
    ),
    "response cache hit, FP32[16], by `h2load -m 1`, 1 connection": Load(
        "identity_cached", 16, 1, by_h2load=True
    ),
    "response cache hit, FP32[16], by `h2load -m 1`, 16 connections": Load(
        "identity_cached", 16, 16, by_h2load=True
    ),
    "16 sequences (oldest) of FP32[16] on a stream": Load(
        "identity_sequence", 16, 16, streaming=True
    ),
    "identity FP32[16] in a coroutine, concurrency 1": Load("identity_coroutine", 16, 1),
    "identity FP32[16] in a coroutine, concurrency 16": Load("identity_coroutine", 16, 16),
    "BLS to identity FP32[16], concurrency 1": Load("bls_identity", 16, 1),
    "BLS to identity FP32[16], concurrency 16": Load("bls_identity", 16, 16),
    "16 async BLS calls of FP32[16] per request, concurrency 1": Load("bls_async", 16, 1),
    "16 async BLS calls of FP32[16] per request, concurrency 4": Load("bls_async", 16, 4),
    "16 async BLS calls of 602 kB per request, concurrency 1": Load("bls_async", IMAGE, 1),
    "ten BLS calls of 4 MB per request, concurrency 1": Load("bls_large", 16, 1),
    "BLS to identity, 4 MB, concurrency 1": Load("bls_identity", MEGABYTES, 1),
    "BLS to identity, 4 MB in system shared memory, concurrency 1": Load(
        "bls_identity", MEGABYTES, 1, True
    ),
    f"{THREE}, FP32[16], concurrency 1": Load("ensemble_identity", 16, 1),
    f"{THREE}, FP32[16], concurrency 16": Load("ensemble_identity", 16, 16),
    f"{THREE}, 4 MB, concurrency 1": Load("ensemble_identity", MEGABYTES, 1),
    f"{THREE}, 4 MB in system shared memory, concurrency 1": Load(
        "ensemble_identity", MEGABYTES, 1, True
    ),
    "1,000 responses per request, in responses/s, concurrency 1": Load(
        "repeat", 1, 1, responses=1000
    ),
}

for _door, _http in (("gRPC", False), ("HTTP", True)):
    for _concurrency in (1, 16):
        LOADS[f"{_door} identity of 1,000 strings of 32 bytes, concurrency {_concurrency}"] = Load(
            "identity_bytes", 1000, _concurrency, http=_http, string_length=32
        )
"""Loads by the name of their row in the table."""

INSTANCE_LOADS = {
    "4 instances, FP32[16], concurrency 16": Load("identity_four", 16, 16),
    "4 instances, FP32[16], concurrency 64": Load("identity_four", 16, 64),
    "4 instances by `h2load -m 1`, 16 connections": Load("identity_four", 16, 16, by_h2load=True),
    "4 instances by `h2load -m 1`, 64 connections": Load("identity_four", 16, 64, by_h2load=True),
    "16 instances of a model that takes 2 ms, concurrency 64": Load("sleep_sixteen", 16, 64),
}
"""Loads of models with several instances, by the name of their row."""
