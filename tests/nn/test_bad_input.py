"""Bad input to the modules: the type of the error, and one sentence that names the argument."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import fastattn

X = torch.zeros(2, 5, 8)


def attention(**arguments):
    embed_dim, num_heads = arguments.pop("embed_dim", 8), arguments.pop("num_heads", 2)
    return fastattn.MultiHeadAttention(embed_dim, num_heads, **arguments)


def attend(query=X, key=None, value=None, *, made=None, **given):
    key = query if key is None else key
    value = key if value is None else value
    module = attention(**{"batch_first": True, **(made or {})})
    return module(query, key, value, **given)


def norm(x=X, residual=None, **arguments):
    return fastattn.AddLayerNorm(8, **arguments)(x, residual)


def entropy(hidden=X, target=None, **arguments):
    target = torch.zeros(2, 5, dtype=torch.int64) if target is None else target
    return fastattn.LinearCrossEntropy(8, 11, **arguments)(hidden, target)


def bools(*shape):
    return torch.zeros(shape, dtype=torch.bool)


def nested():
    return torch.nested.nested_tensor([torch.zeros(3, 8), torch.zeros(5, 8)])


HALF, META = X.half(), X.to("meta")

# (what is wrong, error, the argument it names, the call)
CONSTRUCTORS = [
    ("zero", ValueError, "embed_dim", lambda: attention(embed_dim=0)),
    ("float", TypeError, "embed_dim", lambda: attention(embed_dim=8.0)),
    ("negative", ValueError, "num_heads", lambda: attention(num_heads=-2)),
    ("not a multiple of num_heads", ValueError, "embed_dim", lambda: attention(num_heads=3)),
    ("zero", ValueError, "kdim", lambda: attention(kdim=0)),
    ("a string", TypeError, "vdim", lambda: attention(vdim="8")),
    ("not a divisor", ValueError, "num_kv_heads", lambda: attention(num_kv_heads=3)),
    ("more than num_heads", ValueError, "num_kv_heads", lambda: attention(num_kv_heads=4)),
    ("zero", ValueError, "head_dim", lambda: attention(head_dim=0)),
    ("negative", ValueError, "v_head_dim", lambda: attention(v_head_dim=-1)),
    ("beyond 1", ValueError, "dropout", lambda: attention(dropout=1.5)),
    ("a string", ValueError, "dropout", lambda: attention(dropout="0.1")),
    ("three numbers", ValueError, "window", lambda: attention(window=(1, 2, 3))),
    ("a float", ValueError, "window", lambda: attention(window=1.5)),
    ("below -1", ValueError, "window", lambda: attention(window=(-2, 0))),
    ("unknown", ValueError, "causal_alignment", lambda: attention(causal_alignment="left")),
    ("a tuple", TypeError, "normalized_shape", lambda: fastattn.AddLayerNorm((8, 8))),
    ("zero", ValueError, "normalized_shape", lambda: fastattn.AddLayerNorm(0)),
    ("negative", ValueError, "dropout", lambda: fastattn.AddLayerNorm(8, dropout=-0.1)),
    ("zero", ValueError, "in_features", lambda: fastattn.LinearCrossEntropy(0, 8)),
    ("a float", TypeError, "num_classes", lambda: fastattn.LinearCrossEntropy(8, 8.0)),
    ("beyond 1", ValueError, "label_smoothing", lambda: entropy(label_smoothing=2)),
    ("unknown", ValueError, "smoothing", lambda: entropy(smoothing="paper")),
    ("unknown", ValueError, "reduction", lambda: entropy(reduction="average")),
    ("a tensor", TypeError, "weight", lambda: entropy(weight=torch.zeros(11, 8))),
    ("transposed", ValueError, "weight", lambda: entropy(weight=nn.Parameter(torch.zeros(8, 11)))),
    ("too short", ValueError, "class_weight", lambda: entropy(class_weight=torch.ones(10))),
    ("integers", TypeError, "class_weight", lambda: entropy(class_weight=torch.ones(11).long())),
]
CALLS = [
    ("not a tensor", TypeError, "query", lambda: attend([[0.0] * 8], X)),
    ("integers", TypeError, "query", lambda: attend(X.long())),
    ("another width", ValueError, "query", lambda: attend(torch.zeros(2, 5, 9))),
    ("four dimensions", ValueError, "query", lambda: attend(torch.zeros(1, 2, 5, 8))),
    ("one dimension", ValueError, "query", lambda: attend(torch.zeros(8))),
    ("another dtype", TypeError, "query", lambda: attend(HALF)),
    ("another device", ValueError, "query", lambda: attend(META)),
    ("nested", TypeError, "query", lambda: attend(nested())),
    ("missing", TypeError, "value", lambda: attention()(X, X.clone(), None)),
    ("unbatched", ValueError, "key", lambda: attend(X, torch.zeros(5, 8))),
    ("another batch", ValueError, "key", lambda: attend(X, torch.zeros(3, 5, 8))),
    ("batch of one", ValueError, "key", lambda: attend(torch.zeros(1, 5, 8), X)),
    ("another width", ValueError, "key", lambda: attend(X, X.clone(), made=dict(kdim=5))),
    ("another dtype", TypeError, "key", lambda: attend(X, X.double())),
    ("another device", ValueError, "key", lambda: attend(X, META)),
    ("another length", ValueError, "value", lambda: attend(X, X.clone(), torch.zeros(2, 4, 8))),
    ("another batch", ValueError, "value", lambda: attend(X, X.clone(), torch.zeros(3, 5, 8))),
    ("a list", TypeError, "attn_mask", lambda: attend(attn_mask=[[True]])),
    ("integers", TypeError, "attn_mask", lambda: attend(attn_mask=torch.zeros(5, 5).long())),
    ("another length", ValueError, "attn_mask", lambda: attend(attn_mask=bools(5, 6))),
    ("one per sample", ValueError, "attn_mask", lambda: attend(attn_mask=bools(2, 5, 5))),
    ("four dimensions", ValueError, "attn_mask", lambda: attend(attn_mask=bools(2, 2, 5, 5))),
    ("another device", ValueError, "attn_mask", lambda: attend(attn_mask=bools(5, 5).to("meta"))),
    (
        "wider than the query",
        TypeError,
        "attn_mask",
        lambda: attend(attn_mask=torch.zeros(5, 5).double()),
    ),
    ("transposed", ValueError, "key_padding_mask", lambda: attend(key_padding_mask=bools(5, 2))),
    ("one for all", ValueError, "key_padding_mask", lambda: attend(key_padding_mask=bools(5))),
    (
        "bytes",
        TypeError,
        "key_padding_mask",
        lambda: attend(key_padding_mask=torch.zeros(2, 5).byte()),
    ),
    (
        "batched for unbatched input",
        ValueError,
        "key_padding_mask",
        lambda: attend(X[0], key_padding_mask=bools(1, 5)),
    ),
    ("unbatched", ValueError, "x", lambda: attention().project_query(X[0])),
    ("another width", ValueError, "key", lambda: attention().project_key_value(X[..., :5], X)),
    ("integers", TypeError, "x", lambda: norm(X.long())),
    ("another width", ValueError, "weight", lambda: norm(torch.zeros(2, 9))),
    ("another shape", ValueError, "residual", lambda: norm(X, X[0])),
    ("another shape", ValueError, "target", lambda: entropy(X, torch.zeros(2, 4).long())),
    ("probabilities", TypeError, "target", lambda: entropy(X, torch.zeros(2, 5))),
    ("beyond the classes", IndexError, "target", lambda: entropy(X, torch.full((2, 5), 11))),
    ("another dtype", TypeError, "weight", lambda: entropy(HALF)),
]
TABLE = [
    pytest.param(error, argument, call, id=f"{argument} {words}")
    for words, error, argument, call in CONSTRUCTORS + CALLS
]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("error, argument, call", TABLE)
def test_bad_input(error, argument, call):
    with pytest.raises((TypeError, ValueError, IndexError)) as caught:
        call()
    message = str(caught.value)
    assert type(caught.value) is error, message
    assert re.match(rf"{argument}\b", message), message
    assert re.search(r"\b(is|are) accepted\b|takes packed", message), message
    assert "\n" not in message and not re.search(r"\.\s", message), message


def test_both_lengths_are_told_where_batch_first_was_forgotten():
    """Sequence-first batches of 2 and 3: the message says which dimension holds the batch."""
    with pytest.raises(ValueError, match="dimension 1 with batch_first=False"):
        attention()(torch.zeros(5, 2, 8), *(torch.zeros(7, 3, 8),) * 2)
