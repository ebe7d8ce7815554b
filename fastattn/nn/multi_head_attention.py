"""Multi-head attention (Vaswani et al. 2017, section 3.2.2) as a drop-in for torch's module.

Letters: B batch, L and S length of queries and keys, E embed_dim, H heads, Hkv heads of the keys
and values, Dk and Dv the width of one head's keys and values.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear

from fastattn.functional import scaled_dot_product_attention
from fastattn.nn._mha_checks import check_arguments, check_inputs, check_sequence
from fastattn.nn._mha_layout import add_batch, append_position, concatenate_heads, split_heads
from fastattn.nn._mha_masks import AttentionMasks, to_functional, with_appended_keys


class MultiHeadAttention(nn.MultiheadAttention):
    """softmax(Q W_q (K W_k)^T / sqrt(Dk) + mask) V W_v, concatenated over heads, times W_o.

    In place of ``torch.nn.MultiheadAttention``: the same arguments, ``state_dict``, initial values
    under the same seed, outputs, weights and gradients. Different on purpose:

    - A query that may attend to nothing: its heads give 0, so that its output is ``out_proj.bias``,
      its weights are 0 and it adds to no gradient. torch gives NaN, in some paths to all queries.
    - ``is_causal`` needs no ``attn_mask``, and is applied in addition to every mask given. torch
      refuses it alone, and takes it for a hint that may replace ``attn_mask``.
    - Keys and values at positions of a bool ``key_padding_mask`` never reach the output, even where
      they are NaN or infinite.
    - ``eval`` computes what ``train`` does, less the dropout, with ``need_weights`` or without.
    - The keys that ``add_bias_kv`` and ``add_zero_attn`` append are exempt from ``is_causal`` too,
      as from the masks. torch has no such combination.
    - Masks of different types (bool, float) go together without a warning, and float32 masks with
      half inputs. Scores and softmax are float32 inside (float64 for float64 inputs).
    - Dropout draws other random numbers than torch's, one pair from the default generator a call.
    - Weights have the dtype of the query inside, also under autocast, where torch's are float32.
    - With ``batch_first`` the output is contiguous, not a transposed view.
    - ``out_proj`` is called as a module, so that its hooks and replacements work.
    - ``torch.nn.TransformerEncoderLayer`` runs a kernel of torch's own in ``eval``, whatever its
      attention module is, unless a keyword-only argument was given to the module or
      ``fastattn.replace_attention`` put it there.
    - Bad input raises TypeError or ValueError, not AssertionError. Nested tensors (torch: in one
      path of ``eval``) and ``torch.jit.script`` are refused.

    Args:
        embed_dim: E, of the query and the output.
        num_heads: H; E must be a multiple of it unless ``head_dim`` is given.
        dropout: of the attention weights, in training only.
        bias: whether the projections have biases.
        add_bias_kv: append one learned key and value (``bias_k``, ``bias_v``) to each sequence.
        add_zero_attn: append one key and value of zeros to each sequence.
        kdim, vdim: widths of key and value; default E.
        batch_first: sequences are [B, L, E] rather than [L, B, E]. Unbatched are [L, E] either way.
        device, dtype: of the parameters.
        num_kv_heads: Hkv, a divisor of H; query head h reads key head h // (H / Hkv).
        window: (left, right): key j is visible to query i if i - left <= j <= i + right on the
            diagonal; an int r means (r, r); -1 is unlimited on its side.
        head_dim: Dk; default E / H.
        v_head_dim: Dv; default Dk.
        causal_alignment: "top_left" or "bottom_right", where the diagonal of ``is_causal`` and
            ``window`` starts if L and S differ.

    With the keyword-only arguments the parameters may have shapes that torch's module has not:
    ``in_proj_weight`` [H Dk + Hkv Dk + Hkv Dv, E], or with ``kdim`` or ``vdim`` other than E
    ``q_proj_weight`` [H Dk, E], ``k_proj_weight`` [Hkv Dk, kdim], ``v_proj_weight`` [Hkv Dv, vdim];
    ``in_proj_bias`` [H Dk + Hkv Dk + Hkv Dv]; ``bias_k`` [1, 1, Hkv Dk], ``bias_v`` [1, 1, Hkv Dv];
    ``out_proj.weight`` [E, H Dv].

    Raises:
        TypeError, ValueError: in one sentence that names the argument.
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_kv_heads: int | None = None,
        window: int | tuple[int, int] | None = None,
        head_dim: int | None = None,
        v_head_dim: int | None = None,
        causal_alignment: str = "top_left",
    ) -> None:
        check_arguments(
            embed_dim, num_heads, dropout, kdim, vdim, num_kv_heads, window, head_dim, v_head_dim,
            causal_alignment,
        )  # fmt: skip
        nn.Module.__init__(self)  # torch's own constructor knows its own shapes only
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self.num_heads = num_heads
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.v_head_dim = self.head_dim if v_head_dim is None else v_head_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.window = window
        self.causal_alignment = causal_alignment
        packed = self.kdim == embed_dim and self.vdim == embed_dim
        # torch's encoder layer asks this before it runs a kernel of its own, which knows no extras
        self._qkv_same_embed_dim = packed and not self._has_extras()
        self._register_parameters(packed, bias, add_bias_kv, device, dtype)
        self._reset_parameters()

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Attention of each query over the keys of its own sequence.

        Args:
            query: [L, B, E], with ``batch_first`` [B, L, E], or [L, E].
            key: [S, B, kdim], [B, S, kdim] or [S, kdim].
            value: [S, B, vdim], [B, S, vdim] or [S, vdim].
            key_padding_mask: [B, S] or [S]. bool: True is padding, ignored. Floating: added to that
                key's scores.
            need_weights: also return the weights. Without them they are never kept.
            attn_mask: [L, S] or [B * H, L, S]. bool: True is blocked (in ``fastattn.functional``
                True is kept). Floating: added to the scaled scores.
            average_attn_weights: the mean of the weights over the heads, rather than each head's.
            is_causal: query i sees no key after the diagonal, in addition to the masks.

        Returns:
            The output, of the query's shape and layout, and the weights after dropout: [B, L, S],
            or [B, H, L, S] without averaging, less B for unbatched input, S with appended keys.
            None without ``need_weights``.

        Raises:
            TypeError, ValueError: in one sentence that names the argument.
        """
        check_inputs(self, query, key, value, key_padding_mask, attn_mask)
        batched = query.dim() == 3
        seq_first = batched and not self.batch_first
        if not batched:
            query, key, value = add_batch(query, key, value)
            key_padding_mask = None if key_padding_mask is None else key_padding_mask.unsqueeze(0)
        q, k, v = self._project(query, key, value, seq_first)
        masks = AttentionMasks(
            to_functional(attn_mask, q.shape[0], self.num_heads),
            key_padding_mask,
            is_causal,
            self.window,
        )
        if self.bias_k is not None or self.add_zero_attn:
            k, v, masks = self._append_keys(q, k, v, masks)
        attended = scaled_dot_product_attention(
            q, k, v, masks.attn_mask, self.dropout if self.training else 0.0, masks.is_causal,
            enable_gqa=self.num_kv_heads != self.num_heads, key_padding_mask=masks.key_padding_mask,
            causal_alignment=self.causal_alignment, window=masks.window,
            return_weights=need_weights,
        )  # fmt: skip
        if isinstance(attended, Tensor):
            context, weights = attended, None
        else:
            context, weights = attended.output, attended.weights
        output = self.out_proj(concatenate_heads(context, seq_first))
        if weights is not None and average_attn_weights:
            weights = weights.mean(1)
        if not batched:
            output = output.squeeze(0)
            weights = None if weights is None else weights.squeeze(0)
        return output, weights

    def project_query(self, x: Tensor) -> Tensor:
        """The query of each head, x W_q + b_q: [B, L, E] -> [B, H, L, Dk].

        With ``project_key_value`` and ``merge_heads``, the parts of ``forward`` for a caller that
        keeps keys and values between calls. Batch first whatever ``batch_first`` says, and without
        what ``add_bias_kv`` and ``add_zero_attn`` append.
        """
        check_sequence(self, "x", x, "E", self.embed_dim)
        query, *_ = self._matrices()
        return split_heads(F.linear(x, *query), self.num_heads)

    def project_key_value(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of each head: [B, S, kdim] and [B, S, vdim] ->
        [B, Hkv, S, Dk] and [B, Hkv, S, Dv]; cheaper if both are the same tensor."""
        check_sequence(self, "key", key, "kdim", self.kdim)
        check_sequence(self, "value", value, "vdim", self.vdim)
        _, *rest = self._matrices()
        return self._project_key_value(key, value, rest, seq_first=False)

    def merge_heads(self, context: Tensor) -> Tensor:
        """The heads side by side, times W_o: [B, H, L, Dv] -> [B, L, E]."""
        return self.out_proj(concatenate_heads(context, seq_first=False))

    def _has_extras(self) -> bool:
        shaped = self.num_kv_heads != self.num_heads or self.v_head_dim != self.head_dim
        wide = self.head_dim * self.num_heads != self.embed_dim
        return shaped or wide or self.window is not None or self.causal_alignment != "top_left"

    def _widths(self) -> list[int]:
        """Columns of the projected queries, keys and values."""
        keys, values = self.num_kv_heads * self.head_dim, self.num_kv_heads * self.v_head_dim
        return [self.num_heads * self.head_dim, keys, values]

    def _register_parameters(
        self,
        packed: bool,
        bias: bool,
        add_bias_kv: bool,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        """In torch's order, on which optimizer states and the random numbers drawn depend."""
        q_width, k_width, v_width = self._widths()
        width = q_width + k_width + v_width

        def register(name: str, wanted: bool, *shape: int) -> None:
            empty = torch.empty(shape, device=device, dtype=dtype) if wanted else None
            self.register_parameter(name, None if empty is None else nn.Parameter(empty))

        register("in_proj_weight", packed, width, self.embed_dim)
        register("q_proj_weight", not packed, q_width, self.embed_dim)
        register("k_proj_weight", not packed, k_width, self.kdim)
        register("v_proj_weight", not packed, v_width, self.vdim)
        register("in_proj_bias", bias, width)
        self.out_proj = NonDynamicallyQuantizableLinear(
            self.num_heads * self.v_head_dim, self.embed_dim, bias, device=device, dtype=dtype
        )
        register("bias_k", add_bias_kv, 1, 1, k_width)
        register("bias_v", add_bias_kv, 1, 1, v_width)

    def _reset_parameters(self) -> None:
        if self.in_proj_weight is not None:
            nn.init.xavier_uniform_(self.in_proj_weight)
        else:
            for weight in (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for bias in (self.bias_k, self.bias_v):
            if bias is not None:
                nn.init.xavier_normal_(bias)

    def _matrices(self) -> list[tuple[Tensor, Tensor | None]]:
        """(weight, bias) of query, then of key and value: as one if packed, else apart.

        Views by one split: its gradient is one concatenation, where slices would each fill a whole
        matrix with zeros.
        """
        q_width, k_width, v_width = widths = self._widths()
        if self.in_proj_weight is not None:
            widths = [q_width, k_width + v_width]
            weights = self.in_proj_weight.split_with_sizes(widths)
        else:
            weights = (self.q_proj_weight, self.k_proj_weight, self.v_proj_weight)
        none, bias = (None,) * len(widths), self._in_bias()
        biases = none if bias is None else bias.split_with_sizes(widths)
        return list(zip(weights, biases, strict=True))

    def _in_bias(self) -> Tensor | None:
        """``in_proj_bias``, which may have been given another dtype than the matrices."""
        bias = self.in_proj_bias
        weight = self.q_proj_weight if self.in_proj_weight is None else self.in_proj_weight
        return bias if bias is None or bias.dtype == weight.dtype else bias.to(weight.dtype)

    def _project(
        self, query: Tensor, key: Tensor, value: Tensor, seq_first: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        if query is key and key is value and self.in_proj_weight is not None:
            packed = F.linear(query, self.in_proj_weight, self._in_bias())
            q, k, v = packed.split_with_sizes(self._widths(), -1)
            return (
                split_heads(q, self.num_heads, seq_first),
                split_heads(k, self.num_kv_heads, seq_first),
                split_heads(v, self.num_kv_heads, seq_first),
            )
        first, *rest = self._matrices()
        q = split_heads(F.linear(query, *first), self.num_heads, seq_first)
        return q, *self._project_key_value(key, value, rest, seq_first)

    def _project_key_value(
        self,
        key: Tensor,
        value: Tensor,
        matrices: list[tuple[Tensor, Tensor | None]],
        seq_first: bool,
    ) -> tuple[Tensor, Tensor]:
        widths = self._widths()[1:]
        if len(matrices) == 1 and key is value:
            k, v = F.linear(key, *matrices[0]).split_with_sizes(widths, -1)
        else:
            if len(matrices) == 1:
                weight, bias = matrices[0]
                biases = (None, None) if bias is None else bias.split_with_sizes(widths)
                matrices = list(zip(weight.split_with_sizes(widths), biases, strict=True))
            k, v = F.linear(key, *matrices[0]), F.linear(value, *matrices[1])
        heads = self.num_kv_heads
        return split_heads(k, heads, seq_first), split_heads(v, heads, seq_first)

    def _append_keys(
        self, q: Tensor, k: Tensor, v: Tensor, masks: AttentionMasks
    ) -> tuple[Tensor, Tensor, AttentionMasks]:
        """k, v and masks with the keys of ``add_bias_kv`` and ``add_zero_attn`` at the end."""
        kv_len = k.shape[2]
        if self.bias_k is not None and self.bias_v is not None:
            k, v = append_position(k, self.bias_k), append_position(v, self.bias_v)
        if self.add_zero_attn:
            k, v = F.pad(k, (0, 0, 0, 1)), F.pad(v, (0, 0, 0, 1))
        appended = k.shape[2] - kv_len
        masks = with_appended_keys(
            masks, appended, q.shape[2], kv_len, self.causal_alignment, q.device
        )
        return k, v, masks
