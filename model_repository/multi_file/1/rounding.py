"""A module beside model.py."""

import numpy as np


def round_to(values, decimals):
    return np.round(values, decimals)
