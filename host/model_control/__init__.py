"""Loading and unloading: model control, the repository poller, and dependencies of ensembles."""
