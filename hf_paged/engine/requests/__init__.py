"""A request: its prompt, its options, its parameters."""
