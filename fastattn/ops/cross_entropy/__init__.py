"""Cross entropy of a linear projection, whose logits are never kept whole."""

from fastattn.ops.cross_entropy._op import linear_cross_entropy

__all__ = ["linear_cross_entropy"]
