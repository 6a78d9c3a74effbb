"""What a request answers: outputs, streams and handles."""
