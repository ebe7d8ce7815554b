"""Masked and causal softmax over the last dimension."""

from fastattn.ops.softmax._op import softmax

__all__ = ["softmax"]
