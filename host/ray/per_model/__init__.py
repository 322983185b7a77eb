"""An application with one deployment for each model, which call each other by handles."""
