"""A server in OpenAI's form above the engine, and the command line `hf-paged`.

Nothing below imports this folder, and `import hf_paged` does not either. The server needs the extra `serve`;
`hf-paged generate` and `hf-paged info` do not.
"""
