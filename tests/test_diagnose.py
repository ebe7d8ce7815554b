"""fastattn.diagnose: what it reports is so."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import fastattn
from fastattn.testing import Inputs


def qkv(q_len=3, kv_len=4, batch=2, heads=2):
    inputs = Inputs()
    return (inputs.normal(batch, heads, n, 8) for n in (q_len, kv_len, kv_len))


def test_the_mask_is_all_masks_together():
    q, k, v = qkv()
    padding = torch.tensor([[0, 1, 0, 0], [0, 0, 0, 1]]).bool()
    found = fastattn.diagnose(
        fastattn.scaled_dot_product_attention, q, k, v, is_causal=True, key_padding_mask=padding
    )
    (report,) = found.reports
    expected = torch.ones(3, 4, dtype=torch.bool).tril() & ~padding[:, None, None, :]
    assert torch.equal(report.seen, expected.expand(2, 2, 3, 4))
    assert report.empty_rows == 0 and report.unseen_keys == 0.375
    assert report.mask == "padding (2, 4), causal"
    lines = str(found).splitlines()
    assert [line.strip() for line in lines[4:7]] == ["#...", "#...", "#.#."]
    assert "scale 0.353553: 1 / sqrt(8), the width of query and key" in str(found)


def test_rows_without_a_key_and_a_scale_given():
    q, k, v = qkv()
    mask = torch.zeros(3, 4).masked_fill(torch.tensor([0, 1, 0]).bool()[:, None], -math.inf)
    found = fastattn.diagnose(fastattn.scaled_dot_product_attention, q, k, v, mask, scale=0.5)
    (report,) = found.reports
    assert report.empty_rows == pytest.approx(1 / 3)
    assert report.not_finite == 0
    assert "scale 0.5: given; 1 / sqrt(8), the width of query and key is 0.353553" in str(found)
    assert "rows that see nothing 33.3%" in str(found)


def test_scores_entropy_and_output():
    """Equal keys give uniform weights; a large query gives all weight to one key."""
    q, k, v = qkv()
    k = k[:, :, :1].expand_as(k)
    v[..., 0] = float("nan")
    (report,) = fastattn.diagnose(fastattn.scaled_dot_product_attention, q, k, v).reports
    assert report.entropy == pytest.approx([math.log(4)] * 2) and len(report.entropy) == 2
    assert report.entropy_limit == pytest.approx(math.log(4))
    assert report.not_finite == 2 * 2 * 3
    sharp = torch.eye(8)[None, None]
    (report,) = fastattn.diagnose(
        fastattn.scaled_dot_product_attention, sharp * 1000, sharp, sharp, scale=1.0
    ).reports
    assert report.entropy == pytest.approx([0.0]) and report.scores == (0.0, 1000.0)
    assert report.output_max == 1.0 and report.output_rms == pytest.approx(8**-0.5)


def test_every_attention_of_a_model_by_name():
    model = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
    fastattn.replace_attention(model)
    found = fastattn.diagnose(model, torch.ones(2, 5, 8), torch.ones(2, 4, 8), tgt_is_causal=True)
    assert [(r.name, tuple(r.seen.shape)) for r in found.reports] == [
        ("encoder.layers.0.self_attn", (2, 2, 5, 5)),
        ("decoder.layers.0.self_attn", (2, 2, 4, 4)),
        ("decoder.layers.0.multihead_attn", (2, 2, 4, 5)),
    ]
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def test_names_the_backend_that_ran():
    for backend in ("torch", "reference"):
        with fastattn.use_backend(backend):
            (report,) = fastattn.diagnose(fastattn.scaled_dot_product_attention, *qkv()).reports
        assert report.backend == backend


def test_a_large_mask_is_drawn_small():
    q = torch.zeros(1, 1, 200, 4)
    found = str(fastattn.diagnose(fastattn.scaled_dot_product_attention, q, q, q, is_causal=True))
    picture = [line.strip() for line in found.splitlines() if set(line.strip()) <= {"#", "."}]
    assert len(picture) == 29 and {len(line) for line in picture} == {50}
    assert "(every 7. row, every 4. column)" in found


@pytest.mark.parametrize("sizes", [(0, 4, 2), (3, 0, 2), (3, 4, 0)])
def test_nothing_to_see(sizes):
    q_len, kv_len, batch = sizes
    q, k, v = qkv(q_len, kv_len, batch)
    assert "(empty)" in str(fastattn.diagnose(fastattn.scaled_dot_product_attention, q, k, v))


def test_bad_input():
    with pytest.raises(TypeError, match="function is a int; a module or function is accepted"):
        fastattn.diagnose(3)
    with pytest.raises(ValueError, match="called no attention of fastattn; fastattn.replace"):
        fastattn.diagnose(torch.relu, torch.ones(2))
