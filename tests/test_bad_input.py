"""Bad input to the functions: the type of the error, and one sentence that names the argument.

Each sentence says what was given and what is accepted. tests/nn has the same for the modules.
"""

from __future__ import annotations

import re

import pytest
import torch

import fastattn

Q = torch.zeros(2, 4, 5, 8)
K = torch.zeros(2, 4, 7, 8)
P = torch.zeros(9, 2, 8)
ENDS = torch.tensor([0, 4, 9], dtype=torch.int32)
X = torch.zeros(3, 6)
W = torch.ones(6)
HIDDEN, TABLE = torch.zeros(2, 5, 8), torch.zeros(11, 8)
TARGET = torch.zeros(2, 5, dtype=torch.int64)
RNG = torch.tensor([1, 2])
META = torch.device("meta")


def sdpa(query=Q, key=K, value=K, attn_mask=None, **options):
    return fastattn.scaled_dot_product_attention(query, key, value, attn_mask, **options)


def varlen(query=P, key=P, value=P, cu_q=ENDS, cu_k=ENDS, **options):
    return fastattn.varlen_attention(query, key, value, cu_q, cu_k, **options)


def norm(x=X, residual=None, weight=None, bias=None, **options):
    return fastattn.add_layer_norm(x, residual, weight, bias, **options)


def entropy(hidden=HIDDEN, weight=TABLE, target=TARGET, **options):
    return fastattn.linear_cross_entropy(hidden, weight, target, **options)


def softmax(x=X, **options):
    return fastattn.softmax(x, **options)


def dropout(x=X, p=0.5, **options):
    return fastattn.dropout(x, p, **options)


def bools(*shape):
    return torch.ones(shape, dtype=torch.bool)


def ints(*values, dtype=torch.int32):
    return torch.tensor(values, dtype=dtype)


# (what is wrong, error, the argument it names, the call)
ATTENTION = [
    ("a list", TypeError, "query", lambda: sdpa([1.0])),
    ("None", TypeError, "key", lambda: sdpa(key=None)),
    ("int64", TypeError, "query", lambda: sdpa(Q.long())),
    ("bool", TypeError, "value", lambda: sdpa(value=bools(2, 4, 7, 8))),
    ("complex", TypeError, "key", lambda: sdpa(key=K.cfloat())),
    ("another dtype", TypeError, "key", lambda: sdpa(key=K.half())),
    ("another dtype", TypeError, "value", lambda: sdpa(value=K.double())),
    ("another device", ValueError, "key", lambda: sdpa(key=K.to(META))),
    ("another device", ValueError, "value", lambda: sdpa(value=K.to(META))),
    ("one dimension", ValueError, "query", lambda: sdpa(torch.zeros(8))),
    ("another head dimension", ValueError, "key", lambda: sdpa(key=torch.zeros(2, 4, 7, 9))),
    ("another batch", ValueError, "key", lambda: sdpa(key=torch.zeros(3, 4, 7, 8))),
    ("another batch", ValueError, "value", lambda: sdpa(value=torch.zeros(3, 4, 7, 8))),
    ("another length", ValueError, "value", lambda: sdpa(value=torch.zeros(2, 4, 6, 8))),
    ("too many heads", ValueError, "value", lambda: sdpa(value=torch.zeros(2, 2, 7, 8))),
    ("heads without enable_gqa", ValueError, "query",
     lambda: sdpa(key=torch.zeros(2, 2, 7, 8), value=torch.zeros(2, 2, 7, 8))),
    ("heads that do not divide", ValueError, "query",
     lambda: sdpa(key=torch.zeros(2, 3, 7, 8), value=torch.zeros(2, 3, 7, 8), enable_gqa=True)),
    ("no key heads", ValueError, "query",
     lambda: sdpa(key=torch.zeros(2, 0, 7, 8), value=torch.zeros(2, 0, 7, 8), enable_gqa=True)),
    ("a list", TypeError, "attn_mask", lambda: sdpa(attn_mask=[[True]])),
    ("int mask", TypeError, "attn_mask", lambda: sdpa(attn_mask=torch.ones(5, 7).int())),
    ("double mask", TypeError, "attn_mask", lambda: sdpa(attn_mask=torch.ones(5, 7).double())),
    ("half mask", TypeError, "attn_mask", lambda: sdpa(attn_mask=torch.ones(5, 7).half())),
    ("transposed mask", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(7, 5))),
    ("another length", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(5, 20))),
    ("another head count", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(2, 3, 5, 7))),
    ("another batch", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(3, 1, 5, 7))),
    ("five dimensions", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(1, 2, 4, 5, 7))),
    ("another device", ValueError, "attn_mask", lambda: sdpa(attn_mask=bools(5, 7).to(META))),
    ("batch of 3-D", ValueError, "attn_mask",
     lambda: sdpa(Q[0], K[0], K[0], attn_mask=bools(3, 5, 7))),
    ("int padding", TypeError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=torch.ones(2, 7).int())),
    ("padding of queries", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=bools(2, 5))),
    ("padding without batch", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=bools(7))),
    ("float padding of another size", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=torch.zeros(2, 6))),
    ("float padding without batch", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=torch.zeros(7))),
    ("padding elsewhere", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=bools(2, 7).to(META))),
    ("float padding elsewhere", ValueError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=torch.zeros(2, 7, device=META))),
    ("a list of padding", TypeError, "key_padding_mask",
     lambda: sdpa(key_padding_mask=[[True] * 7] * 2)),
    ("negative", ValueError, "dropout_p", lambda: sdpa(dropout_p=-0.1)),
    ("above one", ValueError, "dropout_p", lambda: sdpa(dropout_p=1.5)),
    ("nan", ValueError, "dropout_p", lambda: sdpa(dropout_p=float("nan"))),
    ("a string", ValueError, "dropout_p", lambda: sdpa(dropout_p="0.1")),
    ("None", ValueError, "dropout_p", lambda: sdpa(dropout_p=None)),
    ("a string", TypeError, "is_causal", lambda: sdpa(is_causal="yes")),
    ("a string", TypeError, "scale", lambda: sdpa(scale="0.5")),
    ("nan", ValueError, "scale", lambda: sdpa(scale=float("nan"))),
    ("another word", ValueError, "causal_alignment", lambda: sdpa(causal_alignment="bottom")),
    ("below -1", ValueError, "window", lambda: sdpa(window=-2)),
    ("three sides", ValueError, "window", lambda: sdpa(window=(1, 2, 3))),
    ("floats", ValueError, "window", lambda: sdpa(window=(1.0, 2.0))),
    ("a float", ValueError, "window", lambda: sdpa(window=3.5)),
    ("a bool", ValueError, "window", lambda: sdpa(window=True)),
    ("one number", ValueError, "rng_state", lambda: sdpa(dropout_p=0.1, rng_state=RNG[:1])),
    ("int32", ValueError, "rng_state", lambda: sdpa(dropout_p=0.1, rng_state=RNG.int())),
    ("a tuple", ValueError, "rng_state", lambda: sdpa(dropout_p=0.1, rng_state=(1, 2))),
    ("elsewhere", ValueError, "rng_state", lambda: sdpa(dropout_p=0.1, rng_state=RNG.to(META))),
]  # fmt: skip
VARLEN = [
    ("a list", TypeError, "query", lambda: varlen([1.0])),
    ("four dimensions", ValueError, "query", lambda: varlen(Q)),
    ("two dimensions", ValueError, "key", lambda: varlen(key=P[0])),
    ("another dtype", TypeError, "value", lambda: varlen(value=P.half())),
    ("fewer tokens", ValueError, "value", lambda: varlen(value=P[:8])),
    ("another head dimension", ValueError, "key", lambda: varlen(key=P[..., :7])),
    ("heads without enable_gqa", ValueError, "query", lambda: varlen(torch.zeros(9, 6, 8))),
    ("a list", TypeError, "cu_seqlens_q", lambda: varlen(cu_q=[0, 4, 9])),
    ("int64", TypeError, "cu_seqlens_q", lambda: varlen(cu_q=ENDS.long())),
    ("float", TypeError, "cu_seqlens_k", lambda: varlen(cu_k=ENDS.float())),
    ("two dimensions", ValueError, "cu_seqlens_k", lambda: varlen(cu_k=ENDS[None])),
    ("empty", ValueError, "cu_seqlens_q", lambda: varlen(cu_q=ints(), cu_k=ints())),
    ("another batch", ValueError, "cu_seqlens_k", lambda: varlen(cu_k=ints(0, 9))),
    ("not from zero", ValueError, "cu_seqlens_q", lambda: varlen(cu_q=ints(1, 4, 9))),
    ("not to the end", ValueError, "cu_seqlens_k", lambda: varlen(cu_k=ints(0, 4, 8))),
    ("beyond the end", ValueError, "cu_seqlens_k", lambda: varlen(cu_k=ints(0, 4, 10))),
    ("falling", ValueError, "cu_seqlens_q", lambda: varlen(cu_q=ints(0, 11, 9))),
    ("elsewhere", ValueError, "cu_seqlens_q", lambda: varlen(cu_q=ENDS.to(META))),
    ("too short", ValueError, "max_seqlen_q", lambda: varlen(max_seqlen_q=3)),
    ("too short", ValueError, "max_seqlen_k", lambda: varlen(max_seqlen_k=4)),
    ("a string", TypeError, "max_seqlen_k", lambda: varlen(max_seqlen_k="9")),
    ("above one", ValueError, "dropout_p", lambda: varlen(dropout_p=2)),
    ("another word", ValueError, "causal_alignment", lambda: varlen(causal_alignment=None)),
    ("one number", ValueError, "rng_state", lambda: varlen(dropout_p=0.1, rng_state=RNG[:1])),
]  # fmt: skip
LAYER_NORM = [
    ("None", TypeError, "x", lambda: norm(None)),
    ("int64", TypeError, "x", lambda: norm(X.long())),
    ("no dimension", ValueError, "x", lambda: norm(torch.tensor(1.0))),
    ("another shape", ValueError, "residual", lambda: norm(residual=X[:2])),
    ("broadcasting", ValueError, "residual", lambda: norm(residual=X[:1])),
    ("int64", TypeError, "residual", lambda: norm(residual=X.long())),
    ("elsewhere", ValueError, "residual", lambda: norm(residual=X.to(META))),
    ("another size", ValueError, "weight", lambda: norm(weight=W[:5])),
    ("two dimensions", ValueError, "weight", lambda: norm(weight=W[None])),
    ("a number", TypeError, "weight", lambda: norm(weight=1.0)),
    ("int64", TypeError, "bias", lambda: norm(bias=W.long())),
    ("elsewhere", ValueError, "bias", lambda: norm(bias=W.to(META))),
    ("negative", ValueError, "dropout_p", lambda: norm(dropout_p=-1)),
    ("a string", TypeError, "eps", lambda: norm(eps="1e-5")),
    ("negative", ValueError, "eps", lambda: norm(eps=-1e-5)),
    ("None", TypeError, "eps", lambda: norm(eps=None)),
    ("float", ValueError, "rng_state", lambda: norm(dropout_p=0.5, rng_state=RNG.float())),
]  # fmt: skip
SOFTMAX = [
    ("a list", TypeError, "x", lambda: softmax([1.0])),
    ("int64", TypeError, "x", lambda: softmax(X.long())),
    ("no dimension", ValueError, "x", lambda: softmax(torch.tensor(1.0))),
    ("one dimension and causal", ValueError, "x", lambda: softmax(W, is_causal=True)),
    ("another width", ValueError, "mask", lambda: softmax(mask=bools(3, 5))),
    ("more dimensions", ValueError, "mask", lambda: softmax(mask=bools(1, 3, 6))),
    ("int", TypeError, "mask", lambda: softmax(mask=torch.ones(3, 6).int())),
    ("double", TypeError, "mask", lambda: softmax(mask=torch.ones(3, 6).double())),
    ("a list", TypeError, "mask", lambda: softmax(mask=[True] * 6)),
    ("elsewhere", ValueError, "mask", lambda: softmax(mask=bools(3, 6).to(META))),
    ("a string", TypeError, "scale", lambda: softmax(scale="1")),
    ("nan", ValueError, "scale", lambda: softmax(scale=float("nan"))),
    ("None", TypeError, "is_causal", lambda: softmax(is_causal=None)),
]  # fmt: skip
CROSS_ENTROPY = [
    ("a list", TypeError, "hidden", lambda: entropy([1.0])),
    ("int64", TypeError, "hidden", lambda: entropy(HIDDEN.long())),
    ("another width", ValueError, "weight", lambda: entropy(weight=TABLE.T)),
    ("one dimension", ValueError, "weight", lambda: entropy(weight=TABLE[0])),
    ("another dtype", TypeError, "weight", lambda: entropy(weight=TABLE.half())),
    ("elsewhere", ValueError, "weight", lambda: entropy(weight=TABLE.to(META))),
    ("no classes", ValueError, "weight", lambda: entropy(weight=TABLE[:0])),
    ("another size", ValueError, "bias", lambda: entropy(bias=torch.zeros(10))),
    ("a number", TypeError, "bias", lambda: entropy(bias=0.0)),
    ("another size", ValueError, "class_weight", lambda: entropy(class_weight=torch.ones(2))),
    ("int64", TypeError, "class_weight", lambda: entropy(class_weight=torch.ones(11).long())),
    ("another shape", ValueError, "target", lambda: entropy(target=TARGET.T)),
    ("one-hot", ValueError, "target", lambda: entropy(target=torch.zeros(2, 5, 11))),
    ("float", TypeError, "target", lambda: entropy(target=TARGET.float())),
    ("int32", TypeError, "target", lambda: entropy(target=TARGET.int())),
    ("a list", TypeError, "target", lambda: entropy(target=[[0] * 5] * 2)),
    ("elsewhere", ValueError, "target", lambda: entropy(target=TARGET.to(META))),
    ("beyond the classes", IndexError, "target", lambda: entropy(target=TARGET + 11)),
    ("negative", IndexError, "target", lambda: entropy(target=TARGET - 1)),
    ("not the ignored index", IndexError, "target",
     lambda: entropy(target=TARGET - 100, ignore_index=-1)),
    ("above one", ValueError, "label_smoothing", lambda: entropy(label_smoothing=1.1)),
    ("a string", ValueError, "label_smoothing", lambda: entropy(label_smoothing="0.1")),
    ("another word", ValueError, "smoothing", lambda: entropy(smoothing="paper")),
    ("another word", ValueError, "reduction", lambda: entropy(reduction="batchmean")),
    ("a float", TypeError, "ignore_index", lambda: entropy(ignore_index=-100.0)),
]  # fmt: skip
DROPOUT = [
    ("a list", TypeError, "x", lambda: dropout([1.0])),
    ("int64", TypeError, "x", lambda: dropout(X.long())),
    ("negative", ValueError, "p", lambda: dropout(p=-0.5)),
    ("a string", ValueError, "p", lambda: dropout(p="half")),
    ("three numbers", ValueError, "rng_state", lambda: dropout(rng_state=torch.arange(3))),
    ("a list", ValueError, "rng_state", lambda: dropout(rng_state=[1, 2])),
    ("elsewhere", ValueError, "rng_state", lambda: dropout(rng_state=RNG.to(META))),
]  # fmt: skip

TABLES = {
    "attention": ATTENTION,
    "varlen": VARLEN,
    "layer_norm": LAYER_NORM,
    "softmax": SOFTMAX,
    "cross_entropy": CROSS_ENTROPY,
    "dropout": DROPOUT,
}
CASES = [
    pytest.param(*case[1:], id=f"{function}-{case[2]}-{case[0]}".replace(" ", "_"))
    for function, table in TABLES.items()
    for case in table
]


@pytest.mark.parametrize(("error", "argument", "call"), CASES)
def test_one_sentence_names_the_argument(error, argument, call):
    with pytest.raises(error) as caught:
        call()
    assert caught.type is error
    message = str(caught.value)
    assert re.search(rf"\b{argument}\b", message), message
    assert "accepted" in message, message  # what would be right
    assert "\n" not in message and len(message) < 300, message
