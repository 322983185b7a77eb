"""What can be asked: models, how they come and go, and who is loaded now."""
