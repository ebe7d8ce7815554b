"""LayerNorm of a residual sum, with dropout on the branch."""

from fastattn.ops.layer_norm._op import add_layer_norm

__all__ = ["add_layer_norm"]
