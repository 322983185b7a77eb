"""Prometheus metrics: those of the server, and custom metrics of models."""
