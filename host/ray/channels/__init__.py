"""Connections between replicas, for requests and calls that need no slot of Ray Serve."""
