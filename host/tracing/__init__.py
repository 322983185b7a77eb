"""Traces of requests: which are taken, what is noted of them, and where they go (protocol 7)."""
