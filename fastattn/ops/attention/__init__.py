"""Scaled dot-product attention, over padded batches and over packed sequences."""

from fastattn.ops.attention._checks import check_mask, check_padding
from fastattn.ops.attention._op import attention
from fastattn.ops.attention._varlen_op import varlen_attention

__all__ = ["attention", "check_mask", "check_padding", "varlen_attention"]
