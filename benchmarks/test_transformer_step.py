"""A whole training step of the paper's Transformer beside the same model on torch.nn.Transformer.

Same sizes, same places of dropout, tied embeddings, label smoothing and Adam on both sides; batches
of padded sentences with random tokens.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from benchmarks import limits
from examples.translation.config import load_config
from examples.translation.model import SinusoidalPositions, Transformer
from examples.translation.optim import adam

PAD = 0


class Case(NamedTuple):
    name: str
    config: str
    vocab_size: int
    sentences: int
    length: int
    dtype: torch.dtype
    reach: float


CASES = [
    Case("base", "base", 37000, 50, 40, torch.float32, 1.3),
    Case("base", "base", 37000, 50, 40, torch.bfloat16, 1.3),
    Case("tiny d128", "tiny", 8000, 128, 16, torch.float32, 1.6),
]


class TorchTransformer(nn.Module):
    """nn.Transformer as the paper has it: dropout on sublayer outputs and embeddings alone."""

    def __init__(self, config):
        super().__init__()
        self.embedding = nn.Parameter(torch.randn(config.vocab_size, config.d_model) * 0.02)
        self.positions = SinusoidalPositions(config)
        self.dropout = nn.Dropout(config.dropout)
        self.transformer = nn.Transformer(
            config.d_model,
            config.heads,
            config.layers,
            config.layers,
            config.d_ff,
            config.dropout,
            layer_norm_eps=config.norm_eps,
            batch_first=True,
        )
        self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.transformer.encoder.enable_nested_tensor = False
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = config.attention_dropout
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = config.relu_dropout

    def embed(self, tokens: Tensor) -> Tensor:
        x = F.embedding(tokens, self.embedding) * self.embedding.shape[1] ** 0.5
        return self.dropout(x + self.positions(tokens.shape[1]))

    def loss(self, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
        length = target.shape[1]
        causal = nn.Transformer.generate_square_subsequent_mask(length)
        hidden = self.transformer(
            self.embed(source),
            self.embed(target),
            tgt_mask=causal,
            tgt_is_causal=True,
            src_key_padding_mask=source == PAD,
            memory_key_padding_mask=source == PAD,
        )
        logits = F.linear(hidden, self.embedding)
        return F.cross_entropy(
            logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1, ignore_index=PAD
        )


def _fastattn_loss(model: Transformer, source: Tensor, target: Tensor, labels: Tensor) -> Tensor:
    padding = source == PAD
    hidden = model.decode(target, model.encode(source, padding), padding)
    return fastattn.linear_cross_entropy(
        hidden.flatten(0, 1),
        model.embedding.weight,
        labels.flatten(),
        label_smoothing=0.1,
        ignore_index=PAD,
    )


def _batch(case: Case) -> tuple[Tensor, Tensor, Tensor]:
    """source, target (shifted right) and labels: lengths from 3/4 of the longest to the longest."""
    source, target = (
        torch.randint(4, case.vocab_size, (case.sentences, case.length)) for _ in range(2)
    )
    labels = torch.cat([target[:, 1:], target[:, :1]], 1)
    for row in range(case.sentences):
        end = case.length - row % (case.length // 4)
        source[row, end:] = labels[row, end:] = PAD
    return source, target, labels


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.dtype}")
def test_training_step(race, case):
    config = load_config(case.config)
    shape = replace(config.model, vocab_size=case.vocab_size)
    if case.name == "tiny d128":
        shape = replace(shape, d_model=128, d_ff=512, layers=4, heads=4)
    models = {"ours": Transformer(shape), "peer": TorchTransformer(shape)}
    losses = {"ours": lambda *b: _fastattn_loss(models["ours"], *b), "peer": models["peer"].loss}
    optimizers = {name: adam(model.parameters(), config.training) for name, model in models.items()}
    batch = _batch(case)

    def step(name: str) -> Tensor:
        optimizers[name].zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == torch.bfloat16):
            loss = losses[name](*batch)
        loss.backward()
        optimizers[name].step()
        return loss

    tokens = case.sentences * case.length
    race(
        f"Transformer step: {case.name} {str(case.dtype).removeprefix('torch.')} "
        f"V{case.vocab_size} {tokens} tokens",
        lambda: step("ours"),
        lambda: step("peer"),
        peer_name="torch.nn.Transformer",
        reach=case.reach,
        limit_seconds=_matmul_flops(shape, tokens) / limits.matmul_flops(case.dtype),
        limit_name="matmul rate",
    )


def _matmul_flops(config, tokens: int) -> float:
    """Forward and backward of every matrix a token meets: 6 flops a weight."""
    d, ff = config.d_model, config.d_ff
    attention = 2 * d * config.heads * (config.key_dim + config.value_dim)
    weights = config.layers * (3 * attention + 2 * 2 * d * ff) + config.vocab_size * d
    return 6.0 * tokens * weights
