"""What must hold whatever a client sends, and a fuzzer led by coverage to what breaks it."""
