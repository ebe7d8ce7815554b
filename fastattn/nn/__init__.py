"""Modules over ``fastattn.functional``."""

from fastattn.nn.add_layer_norm import AddLayerNorm
from fastattn.nn.linear_cross_entropy import LinearCrossEntropy
from fastattn.nn.multi_head_attention import MultiHeadAttention

__all__ = ["AddLayerNorm", "LinearCrossEntropy", "MultiHeadAttention"]
