"""Serves plain Python functions as models, without a model repository.

`Host` serves functions; `TensorSpec` and `ModelConfig` describe them. A function is called with a
list of `Request`; decorators convert this list to arrays. Only `Host.run` and `Host.serve` need a
server: tests can call decorated functions directly, see `bound_as`.
"""

from host.bind import *  # noqa: F403
from host.bind import __all__ as __all__
