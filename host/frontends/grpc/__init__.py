"""Triton's gRPC service, without a gRPC library: handlers of message bytes, for either engine."""
