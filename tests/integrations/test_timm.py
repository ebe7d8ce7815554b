"""A vision transformer of timm, which calls torch's function, under patch_sdpa."""

from __future__ import annotations

import pytest
import torch

import fastattn
from fastattn.integrations import sdpa
from fastattn.testing import Inputs

# timm needs the torchvision built for this very torch, so no extra of fastattn asks for it.
timm = pytest.importorskip("timm", reason="timm is not installed")

pytestmark = pytest.mark.slow


def run(model, images):
    output = model(images)
    return [output, *torch.autograd.grad(output.square().sum(), list(model.parameters()))]


def test_a_vision_transformer_keeps_its_numbers(monkeypatch):
    torch.manual_seed(0)
    model = timm.models.vision_transformer.VisionTransformer(
        img_size=16, patch_size=8, embed_dim=32, depth=2, num_heads=4, num_classes=5
    ).double()
    images = Inputs().normal(2, 3, 16, 16, dtype=torch.float64)
    expected = run(model, images)
    calls = []
    ours = sdpa.functional.scaled_dot_product_attention

    def recording(*args, **kwargs):
        calls.append(args)
        return ours(*args, **kwargs)

    monkeypatch.setattr(sdpa.functional, "scaled_dot_product_attention", recording)
    with fastattn.patch_sdpa():
        torch.testing.assert_close(run(model, images), expected)
    assert len(calls) == 2
