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
from benchmarks.harness import assert_agree
from examples.translation.config import load_config
from examples.translation.model import SinusoidalPositions, Transformer
from examples.translation.optim import adam

PAD = 0


RENAMED = {
    "self_attention": "self_attn",
    "cross_attention": "multihead_attn",
    "self_connection.norm": "norm1",
    "cross_connection.norm": "norm2",
    "feed_forward.inner": "linear1",
    "feed_forward.outer": "linear2",
}


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
    """nn.Transformer as the paper has it: dropout on sublayer outputs and embeddings alone, no
    biases in attention."""

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
            norm_first=config.norm == "pre",
        )
        if config.norm == "post":
            self.transformer.encoder.norm = self.transformer.decoder.norm = None
        self.transformer.encoder.enable_nested_tensor = False
        for module in self.transformer.modules():
            if isinstance(module, nn.MultiheadAttention):
                module.dropout = config.attention_dropout
                module.in_proj_bias = module.out_proj.bias = None
            if isinstance(module, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
                module.dropout.p = config.relu_dropout

    def take_weights(self, ours: Transformer) -> None:
        """Those of the example's model, under torch's names."""
        state = {}
        for name, value in ours.state_dict().items():
            name = name.replace("embedding.weight", "embedding")
            last = "norm3" if name.startswith("decoder") else "norm2"
            name = name.replace("feed_forward_connection.norm", last)
            for before, after in RENAMED.items():
                name = name.replace(before, after)
            state[name if name == "embedding" else f"transformer.{name}"] = value
        missing, unknown = self.load_state_dict(state, strict=False)
        assert not unknown and all("positions" in name for name in missing), (missing, unknown)

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


@pytest.mark.filterwarnings("ignore:enable_nested_tensor")
@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name}-{c.dtype}")
def test_training_step(race, case):
    config = load_config(case.config)
    shape = replace(config.model, vocab_size=case.vocab_size)
    if case.name == "tiny d128":
        shape = replace(shape, d_model=128, d_ff=512, layers=4, heads=4)
    ours, torchs = Transformer(shape), TorchTransformer(shape)
    torchs.take_weights(ours)
    batch = _batch(case)

    def forward(loss):
        with torch.autocast("cpu", torch.bfloat16, enabled=case.dtype == torch.bfloat16):
            return loss(*batch)

    def training_step(model, loss):
        optimizer = adam(model.parameters(), config.training)

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            forward(loss).backward()
            optimizer.step()

        return step

    def ours_loss(*batch):
        return _fastattn_loss(ours, *batch)

    def check():
        ours.eval(), torchs.eval()
        assert_agree("loss", forward(ours_loss), forward(torchs.loss))
        ours.train(), torchs.train()

    tokens = case.sentences * case.length
    race(
        f"Transformer training step: {case.name} {str(case.dtype).removeprefix('torch.')} "
        f"V{case.vocab_size} {tokens} tokens",
        training_step(ours, ours_loss),
        lambda wrap: training_step(torchs, wrap(torchs.loss)),
        peer_name="torch.nn.Transformer",
        reach=case.reach,
        check=check,
        limit=limits.matmul(_matmul_flops(shape, tokens), case.dtype)
        | limits.exps(tokens * case.vocab_size),
    )


def _matmul_flops(config, tokens: int) -> float:
    """Forward and backward of every matrix a token meets: 6 flops a weight."""
    d, ff = config.d_model, config.d_ff
    attention = 2 * d * config.heads * (config.key_dim + config.value_dim)
    weights = config.layers * (3 * attention + 2 * 2 * d * ff) + config.vocab_size * d
    return 6.0 * tokens * weights
