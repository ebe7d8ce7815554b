"""Fused attention, LayerNorm, softmax and cross entropy for PyTorch."""

try:
    import torch  # noqa: F401
except ModuleNotFoundError as error:
    if error.name != "torch":
        raise
    raise ModuleNotFoundError(
        "fastattn needs PyTorch 2.7 or newer, which is not installed: pip install torch"
    ) from None

from fastattn._diagnose import diagnose
from fastattn._dispatch import BackendError, explain, use_backend
from fastattn._warmup import warmup
from fastattn.functional import (
    AttentionOutput,
    add_layer_norm,
    dropout,
    linear_cross_entropy,
    scaled_dot_product_attention,
    softmax,
    varlen_attention,
)
from fastattn.integrations import patch_sdpa, replace_attention
from fastattn.nn import AddLayerNorm, LinearCrossEntropy, MultiHeadAttention

__version__ = "0.1.0"

__all__ = [
    "AddLayerNorm",
    "AttentionOutput",
    "BackendError",
    "LinearCrossEntropy",
    "MultiHeadAttention",
    "add_layer_norm",
    "diagnose",
    "dropout",
    "explain",
    "linear_cross_entropy",
    "patch_sdpa",
    "replace_attention",
    "scaled_dot_product_attention",
    "softmax",
    "use_backend",
    "varlen_attention",
    "warmup",
]
