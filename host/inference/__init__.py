"""Requests, responses, tensors and metadata: the plain data that every part of the host handles."""
