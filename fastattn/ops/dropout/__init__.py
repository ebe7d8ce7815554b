"""Dropout whose mask is a function of a seed and the element's position."""

from fastattn.ops.dropout._op import dropout

__all__ = ["dropout"]
