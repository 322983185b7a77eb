"""Whether the server and its models are live and ready."""
