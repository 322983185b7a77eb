"""Sequences: requests that belong together and keep their slot in one instance.

Source: docs/reference/configuration_and_scheduling.md, "Sequence batcher".
"""
