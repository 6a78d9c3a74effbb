"""What a request asks for: its prompt, its options, its parameters."""
