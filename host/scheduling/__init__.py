"""Which call runs where and when."""
