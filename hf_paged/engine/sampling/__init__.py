"""Choosing tokens: greedy, sampled and beam search, for all rows at once where possible."""
