"""Models of other servers: they are called like local ones, by ensembles, BLS and clients."""
