"""The commands of `hf-paged`, each a module with `run()`; `serve` alone needs an extra."""
