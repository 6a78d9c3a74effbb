"""A server in OpenAI's form above the engine.

Nothing below imports this folder, and `import hf_paged` does not either. It needs the extra `serve`.
"""
