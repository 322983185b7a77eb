"""Splits the requests to a model between two of its versions: canary and shadow."""
