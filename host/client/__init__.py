"""Clients of a running server: any that speaks Triton's gRPC protocol."""
