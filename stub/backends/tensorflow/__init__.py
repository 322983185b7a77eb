"""The backend `tensorflow`, which is still to come."""
