"""Loaded models: the registry, validation of requests, and versions that run in stubs."""
