"""One process per model instance: imports the user's model and answers the host's messages."""
