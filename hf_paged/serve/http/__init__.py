"""Requests and answers of HTTP, whatever they are about: limits, keys, errors, streams, metrics."""
