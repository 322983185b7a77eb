"""Paths and the working directory, which may be gone: deploy tools replace directories.

Absolute paths still work then. A relative path, at which nothing is found, stays as it is.
"""

import os


def absolute_path(path: str) -> str:
    """As `Path.absolute`: it keeps each `..`, which may come after a link."""
    try:
        return path if os.path.isabs(path) else os.path.join(os.getcwd(), path)
    except FileNotFoundError:
        return path


def real_path(path: str) -> str:
    """As `os.path.realpath`: returns an absolute path with all links resolved."""
    try:
        return os.path.realpath(path)
    except FileNotFoundError:
        return path


def path_from_here(path: str) -> str:
    """As `os.path.relpath`: returns a path relative to the working directory."""
    try:
        return os.path.relpath(path)
    except FileNotFoundError:
        return path
