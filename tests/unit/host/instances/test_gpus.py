"""Finds the GPUs that instances may run on, and reads how much of their memory processes use."""

from __future__ import annotations

from host.instances.gpus import parse_gpu_memory

DEVICES = ["0, GPU-aaaa", "1, GPU-bbbb"]


def test_memory_is_given_by_process_and_gpu() -> None:
    lines = ["100, GPU-aaaa, 1024", "100, GPU-bbbb, 10", "200, GPU-bbbb, 5", "200, GPU-bbbb, 6"]
    assert parse_gpu_memory(DEVICES, lines) == {
        100: {0: 1024 << 20, 1: 10 << 20},
        200: {1: 11 << 20},
    }


def test_what_is_not_known_counts_as_nothing() -> None:
    lines = ["No running processes found", "100, GPU-aaaa, [N/A]", "100, GPU-cccc, 7"]
    assert parse_gpu_memory(DEVICES, lines) == {100: {0: 0}}


def test_warnings_of_the_program_are_no_memory() -> None:
    warning = "WARNING: infoROM is corrupted at gpu 0000:3D:00.0"
    lines = ["100, GPU-aaaa, 1", "WARNING, GPU-aaaa, 1", warning]
    assert parse_gpu_memory([*DEVICES, warning], lines) == {100: {0: 1 << 20}}
