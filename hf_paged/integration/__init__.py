"""What transformers sees: a cache, an attention function, a mask function, and the plug into generate()."""
