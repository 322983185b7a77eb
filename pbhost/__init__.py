"""The command `pbhost`, for `python -m pbhost`."""
