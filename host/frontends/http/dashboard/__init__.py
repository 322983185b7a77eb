"""A web page that shows what a server does: rates, latencies, queues, memory, crashes, the log."""
