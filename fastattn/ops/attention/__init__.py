"""Scaled dot-product attention, over padded batches and over packed sequences."""

from fastattn.ops.attention._op import attention
from fastattn.ops.attention._varlen_op import varlen_attention

__all__ = ["attention", "varlen_attention"]
