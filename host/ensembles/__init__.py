"""Ensembles: models that are a graph of steps, each of which calls another model.

Source: docs/reference/configuration_and_scheduling.md, "Ensembles".
"""
