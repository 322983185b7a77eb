"""Numbers for Prometheus: the server's own, and those that models make."""
