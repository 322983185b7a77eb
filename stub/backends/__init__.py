"""Backends that ship with the project: each a folder with a `model.py`, run like a user's model."""
