"""The backends of this project: folders with a `model.py`, which runs like a user's model."""
