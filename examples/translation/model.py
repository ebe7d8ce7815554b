"""The Transformer of "Attention Is All You Need" (Vaswani et al., 2017), in the paper's order.

B is the number of sentences, S and T the source and target length, d the model's width d_model,
h the number of heads, V the vocabulary's size. Padding masks are bool, True = padding, as
`fastattn.MultiHeadAttention` takes them.
"""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import fastattn
from examples.translation.cache import DecoderState, LayerCache
from examples.translation.config import ModelConfig
from examples.translation.positions import LearnedPositions, SinusoidalPositions


class SublayerConnection(nn.Module):
    """Residual connection, dropout and layer normalization around one sublayer (section 3.1).

    ``norm="post"`` is the paper's LayerNorm(x + Dropout(Sublayer(x))); ``norm="pre"`` is
    x + Dropout(Sublayer(LayerNorm(x))). A layer writes

        y = connection.enter(x)
        y = sublayer(y)
        x = connection.leave(y, x)
    """

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.pre = config.norm == "pre"
        self.dropout = config.dropout
        self.norm = fastattn.AddLayerNorm(
            config.d_model, dropout=0.0 if self.pre else config.dropout, eps=config.norm_eps
        )

    def enter(self, x: Tensor) -> Tensor:
        return self.norm(x) if self.pre else x

    def leave(self, y: Tensor, x: Tensor) -> Tensor:
        if not self.pre:
            return self.norm(y, x)
        return x + _dropout(y, self.dropout, self.training)


class EncoderLayer(nn.Module):
    """Self-attention, then the feed-forward network (section 3.1)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = _attention(config)
        self.self_connection = SublayerConnection(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_connection = SublayerConnection(config)

    def forward(self, x: Tensor, padding: Tensor | None = None) -> Tensor:
        """x [B, S, d], padding [B, S] -> [B, S, d]."""
        y = self.self_connection.enter(x)
        y, _ = self.self_attention(y, y, y, key_padding_mask=padding, need_weights=False)
        x = self.self_connection.leave(y, x)

        y = self.feed_forward_connection.enter(x)
        return self.feed_forward_connection.leave(self.feed_forward(y), x)


class DecoderLayer(nn.Module):
    """Masked self-attention, attention over the encoder's output, feed-forward (section 3.1)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.self_attention = _attention(config)
        self.self_connection = SublayerConnection(config)
        self.cross_attention = _attention(config)
        self.cross_connection = SublayerConnection(config)
        self.feed_forward = FeedForward(config)
        self.feed_forward_connection = SublayerConnection(config)

    def forward(
        self,
        x: Tensor,
        memory: Tensor,
        memory_padding: Tensor | None = None,
        padding: Tensor | None = None,
        need_weights: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """x [B, T, d], memory [B, S, d], memory_padding [B, S], padding [B, T]
        -> ([B, T, d], weights over the memory [B, h, T, S] or None)."""
        y = self.self_connection.enter(x)
        y, _ = self.self_attention(
            y, y, y, key_padding_mask=padding, is_causal=True, need_weights=False
        )
        x = self.self_connection.leave(y, x)

        y = self.cross_connection.enter(x)
        y, weights = self.cross_attention(
            y,
            memory,
            memory,
            key_padding_mask=memory_padding,
            need_weights=need_weights,
            average_attn_weights=False,
        )
        x = self.cross_connection.leave(y, x)

        y = self.feed_forward_connection.enter(x)
        return self.feed_forward_connection.leave(self.feed_forward(y), x), weights

    def step(
        self, x: Tensor, cache: LayerCache, visible: Tensor | None, memory_padding: Tensor | None
    ) -> Tensor:
        """The layer for the next position alone: x [B, K, d], one row a hypothesis -> [B, K, d].

        visible: bool [B, 1, K, L*K] over `cache`'s slots, this position's included; None = all.
        """
        y = self.self_connection.enter(x)
        query = self.self_attention.project_query(y)
        key, value = cache.append(*self.self_attention.project_key_value(y, y))
        y = fastattn.scaled_dot_product_attention(query, key, value, visible)
        x = self.self_connection.leave(self.self_attention.merge_heads(y), x)

        y = self.cross_connection.enter(x)
        y = fastattn.scaled_dot_product_attention(
            self.cross_attention.project_query(y),
            cache.memory_key,
            cache.memory_value,
            key_padding_mask=memory_padding,
        )
        x = self.cross_connection.leave(self.cross_attention.merge_heads(y), x)

        y = self.feed_forward_connection.enter(x)
        return self.feed_forward_connection.leave(self.feed_forward(y), x)


def _attention(config: ModelConfig) -> fastattn.MultiHeadAttention:
    """Multi-head attention without biases (section 3.2.2; d_k and d_v free as in Table 3)."""
    return fastattn.MultiHeadAttention(
        config.d_model,
        config.heads,
        dropout=config.attention_dropout,
        bias=False,
        batch_first=True,
        head_dim=config.key_dim,
        v_head_dim=config.value_dim,
    )


class FeedForward(nn.Module):
    """max(0, x W1 + b1) W2 + b2 (section 3.3)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.inner = nn.Linear(config.d_model, config.d_ff)
        self.outer = nn.Linear(config.d_ff, config.d_model)
        self.dropout = config.relu_dropout

    def forward(self, x: Tensor) -> Tensor:
        """[..., d] -> [..., d]"""
        return self.outer(
            _dropout(F.relu(self.inner(x), inplace=True), self.dropout, self.training)
        )


class Embedding(nn.Module):
    """One matrix for source tokens, target tokens and the pre-softmax projection (section 3.4)."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.vocab_size, config.d_model))
        self.scale = math.sqrt(config.d_model)

    def forward(self, tokens: Tensor, position: Tensor) -> Tensor:
        """tokens [B, L] int64, position [L, d] -> embedding * sqrt(d) + position, [B, L, d]."""
        return torch.add(position, F.embedding(tokens, self.weight), alpha=self.scale)

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., d] -> [..., V]; not scaled."""
        return F.linear(hidden, self.weight)


class Stack(nn.Module):
    """N layers with their positions, and with ``norm="pre"`` one LayerNorm on top."""

    def __init__(self, config: ModelConfig, layer: type[nn.Module]):
        super().__init__()
        learned = config.positions == "learned"
        self.positions = (LearnedPositions if learned else SinusoidalPositions)(config)
        self.layers = nn.ModuleList(layer(config) for _ in range(config.layers))
        norm = fastattn.AddLayerNorm(config.d_model, eps=config.norm_eps)
        self.norm = norm if config.norm == "pre" else nn.Identity()


class Transformer(nn.Module):
    """The encoder-decoder (Figure 1). Raises ValueError where the config has no vocab_size."""

    def __init__(self, config: ModelConfig):
        super().__init__()
        if config.vocab_size is None:
            raise ValueError("vocab_size is missing: give the corpus's in the ModelConfig")
        self.config = config
        self.embedding = Embedding(config)
        self.encoder = Stack(config, EncoderLayer)
        self.decoder = Stack(config, DecoderLayer)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Embedding and learned positions N(0, 1/d), other matrices Xavier-uniform, biases 0.

        Rows of a fused query-key-value matrix are initialised as three matrices: the fan of the
        whole would be another.
        """
        for module in self.modules():
            if isinstance(module, fastattn.MultiHeadAttention):
                for matrix in _projections(module, self.config):
                    nn.init.xavier_uniform_(matrix)
            elif isinstance(module, FeedForward):
                for linear in (module.inner, module.outer):
                    nn.init.xavier_uniform_(linear.weight)
                    nn.init.zeros_(linear.bias)
            elif isinstance(module, Embedding):
                nn.init.normal_(module.weight, std=self.config.d_model**-0.5)
            elif isinstance(module, LearnedPositions):
                nn.init.normal_(module.table, std=self.config.d_model**-0.5)

    def encode(self, source: Tensor, source_padding: Tensor | None = None) -> Tensor:
        """source [B, S] int64, source_padding [B, S] -> memory [B, S, d]."""
        x = self._embed(source, self.encoder)
        for layer in self.encoder.layers:
            x = layer(x, source_padding)
        return self.encoder.norm(x)

    def decode(
        self,
        target: Tensor,
        memory: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> Tensor:
        """target [B, T] int64 (shifted right), memory [B, S, d] -> hidden [B, T, d].

        target_padding [B, T] may be left out where padding stands at the end: no earlier position
        sees it, and the loss ignores its rows.
        """
        x = self._embed(target, self.decoder)
        for layer in self.decoder.layers:
            x, _ = layer(x, memory, source_padding, target_padding)
        return self.decoder.norm(x)

    def forward(
        self,
        source: Tensor,
        target: Tensor,
        source_padding: Tensor | None = None,
        target_padding: Tensor | None = None,
    ) -> Tensor:
        """source [B, S], target [B, T] (shifted right) -> logits [B, T, V]."""
        memory = self.encode(source, source_padding)
        return self.embedding.logits(self.decode(target, memory, source_padding, target_padding))

    @torch.no_grad()
    def cross_attention_weights(
        self, source: Tensor, target: Tensor, source_padding: Tensor | None = None
    ) -> Tensor:
        """Weights of every decoder layer and head over the source: [N, B, h, T, S]."""
        memory = self.encode(source, source_padding)
        x = self._embed(target, self.decoder)
        layers = []
        for layer in self.decoder.layers:
            x, weights = layer(x, memory, source_padding, need_weights=True)
            layers.append(weights)
        return torch.stack(layers)

    def start(
        self, source: Tensor, source_padding: Tensor | None = None, beam: int = 1
    ) -> DecoderState:
        """Encodes source [B, S] and returns the state that `step` continues, of `beam` slots."""
        memory = self.encode(source, source_padding)
        caches = [
            LayerCache(*layer.cross_attention.project_key_value(memory, memory))
            for layer in self.decoder.layers
        ]
        return DecoderState(caches, source_padding, beam)

    def step(self, tokens: Tensor, parents: Tensor, state: DecoderState) -> Tensor:
        """Logits [B, K, V] after one more token in each slot: tokens [B, K] int64.

        Slot k continues slot parents[b, k] of the step before (ignored at the first step).
        """
        position = self.decoder.positions(1, state.length)
        x = self._drop(self.embedding(tokens, position))
        visible = state.advance(parents)
        for layer, cache in zip(self.decoder.layers, state.layers, strict=True):
            x = layer.step(x, cache, visible, state.memory_padding)
        return self.embedding.logits(self.decoder.norm(x))

    def _embed(self, tokens: Tensor, stack: Stack) -> Tensor:
        return self._drop(self.embedding(tokens, stack.positions(tokens.shape[1])))

    def _drop(self, x: Tensor) -> Tensor:
        return _dropout(x, self.config.dropout, self.training)


def parameter_count(config: ModelConfig) -> int:
    """Trainable numbers of `Transformer(config)`, by formula."""
    d, h = config.d_model, config.heads
    attention = 2 * d * h * config.key_dim + 2 * d * h * config.value_dim
    feed_forward = 2 * d * config.d_ff + config.d_ff + d
    norm = 2 * d
    layers = config.layers * (3 * attention + 2 * feed_forward + 5 * norm)
    top_norms = 2 * norm if config.norm == "pre" else 0
    positions = 2 * config.max_positions * d if config.positions == "learned" else 0
    return layers + top_norms + positions + config.vocab_size * d


def _dropout(x: Tensor, p: float, training: bool) -> Tensor:
    return fastattn.dropout(x, p) if training and p > 0 else x


def _projections(attention: fastattn.MultiHeadAttention, config: ModelConfig) -> list[Tensor]:
    """The q, k, v and output matrices, as views."""
    if attention.in_proj_weight is None:
        matrices = [attention.q_proj_weight, attention.k_proj_weight, attention.v_proj_weight]
    else:
        keys, values = config.heads * config.key_dim, config.heads * config.value_dim
        matrices = list(attention.in_proj_weight.detach().split([keys, keys, values]))
    return [*matrices, attention.out_proj.weight]
