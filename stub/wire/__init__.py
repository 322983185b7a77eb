"""The protocol between host and stub: messages, states and shared memory, without any sockets."""
