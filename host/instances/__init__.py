"""Where models run: stub processes, the conversation with them, and keeping them alive."""
