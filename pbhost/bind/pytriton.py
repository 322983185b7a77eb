"""PyTriton's names for `pbhost.bind`: a program of PyTriton has to change only its imports."""

from host.bind.pytriton import *  # noqa: F403
from host.bind.pytriton import __all__ as __all__
