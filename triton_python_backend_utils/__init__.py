"""The name by which existing models import ``pb_utils``."""

from pb_utils import *  # noqa: F403
