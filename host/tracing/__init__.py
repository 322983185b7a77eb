"""Request tracing: sampling, events, and export to files or to OpenTelemetry."""
