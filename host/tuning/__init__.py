"""Finds the scheduling settings of a model by measuring it under load."""
