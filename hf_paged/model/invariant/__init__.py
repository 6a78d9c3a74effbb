"""Batch-invariant arithmetic: a token's logits have the same bits whatever is computed beside it."""
