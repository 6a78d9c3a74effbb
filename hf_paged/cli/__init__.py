"""The command `hf-paged`. `serve` needs the extra `serve`; the other commands do not."""
