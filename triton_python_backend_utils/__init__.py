"""The name by which existing models import ``pb_utils``."""

# Models find these modules here, as in Triton: `pb_utils.np`, or `json` after an import of `*`.
import json as json
import struct as struct
import typing as _typing

import numpy as np  # noqa: F401

from pb_utils import *  # noqa: F403
from pb_utils import __all__ as _names
from pb_utils._exceptions import missing_name as _missing_name

if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError, with the name that was probably meant."""
        raise _missing_name(__name__, name, _names)
