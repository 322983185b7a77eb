"""Generates load: sends prepared requests in closed or open loop, and measures the responses."""
