"""Calls of models to other models (BLS): their targets, and the detection of deadlocks."""
