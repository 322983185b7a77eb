"""The name by which existing models import ``pb_utils``."""

import typing as _typing

from pb_utils import *  # noqa: F403
from pb_utils import __all__ as _names
from pb_utils._suggestions import missing_name as _missing_name

if not _typing.TYPE_CHECKING:  # otherwise type checkers would accept any name

    def __getattr__(name: str) -> object:
        """Raises AttributeError, with the name that was probably meant."""
        raise _missing_name(__name__, name, _names)
