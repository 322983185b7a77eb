"""Model configurations: parses, completes, validates and prints them."""
