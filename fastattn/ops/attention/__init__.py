"""Scaled dot-product attention, over padded batches and over packed sequences."""

from fastattn.ops.attention._arguments import (
    add_to_mask,
    check_heads,
    check_scalars,
    default_scale,
    to_four_dims,
)
from fastattn.ops.attention._op import attention
from fastattn.ops.attention._varlen_op import varlen_attention

__all__ = [
    "add_to_mask",
    "attention",
    "check_heads",
    "check_scalars",
    "default_scale",
    "to_four_dims",
    "varlen_attention",
]
