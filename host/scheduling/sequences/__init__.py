"""Requests that belong together and keep their place in a model (configuration spec 5)."""
