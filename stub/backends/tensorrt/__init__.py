"""The backend `tensorrt`, which is still to come."""
