"""One process per model instance: imports the user's model and handles the host's messages."""
