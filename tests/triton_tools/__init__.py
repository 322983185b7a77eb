"""Programs of other clients of Triton's protocols, which run in environments of their own."""
