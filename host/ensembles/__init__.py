"""Ensembles: models that are a graph of steps, each of which calls another model.

Source: docs/reference/ensembles.md, "Ensembles".
"""
