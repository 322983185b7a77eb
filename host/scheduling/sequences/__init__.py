"""Sequences: requests that belong together and keep their slot in one instance.

Source: docs/reference/configuration-and-scheduling.md, "Sequence batcher".
"""
