"""The engine of a server, in its own process or thread: messages, and both ends of them."""
