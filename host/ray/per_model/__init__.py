"""An application with one deployment for each model."""
