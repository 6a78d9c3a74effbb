"""The live map of a server, and its page."""
