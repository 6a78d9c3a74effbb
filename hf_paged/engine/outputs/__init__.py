"""A request's answers: outputs, streams and handles."""
