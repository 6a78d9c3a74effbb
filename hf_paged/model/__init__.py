"""A foreign model, adapted: attention over pages, a known state, captured decoding steps."""
