"""Triton's gRPC service: handlers of message bytes, which either engine carries."""
