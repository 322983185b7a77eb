"""What host and stub say to each other: messages, legal moves and shared memory; no socket here."""
