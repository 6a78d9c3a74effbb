"""Captured steps: one decoding step recorded as a CUDA graph, with fused and compiled layers."""
