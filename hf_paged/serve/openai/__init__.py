"""OpenAI's API: bodies, prompts and replies."""
