"""One server, put together from its options: endpoints, metrics, and calls in-process."""
