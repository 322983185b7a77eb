"""Model instances: stub processes, the messages between host and stub, and restarts."""
