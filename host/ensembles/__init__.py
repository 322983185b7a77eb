"""Models that are made of other models: a graph of steps (configuration spec 6)."""
