"""Sequences: requests that belong together and keep their slot in one instance.

Source: docs/reference/scheduling.md, "Sequence batcher".
"""
