"""Hugging Face models with attn_implementation="fastattn" beside "eager" and "sdpa"."""

from __future__ import annotations

import copy
import os

import pytest
import torch

import fastattn
from fastattn.testing import Inputs, check_all

os.environ["HF_HUB_OFFLINE"] = "1"
transformers = pytest.importorskip("transformers", reason="the extra integrations is not installed")

import fastattn.integrations.transformers as integration  # noqa: E402

VOCABULARY, PAD, LENGTH = 50, 49, 7
IDS = dict(pad_token_id=PAD, eos_token_id=0, bos_token_id=1, vocab_size=VOCABULARY)


def bert():
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        intermediate_size=48, max_position_embeddings=32,
    )  # fmt: skip
    return transformers.BertForMaskedLM(config)


def gpt2():
    config = transformers.GPT2Config(n_embd=32, n_layer=2, n_head=4, n_positions=32, **IDS)
    return transformers.GPT2LMHeadModel(config)


def llama():
    config = transformers.LlamaConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=48, max_position_embeddings=32, **IDS,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def marian():
    config = transformers.MarianConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=2, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_position_embeddings=32, decoder_start_token_id=PAD, forced_eos_token_id=None,
        decoder_vocab_size=VOCABULARY, **IDS,
    )  # fmt: skip
    return transformers.MarianMTModel(config)


def whisper():
    config = transformers.WhisperConfig(
        d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
        decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, num_mel_bins=8,
        max_source_positions=16, max_target_positions=32, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None, **IDS,
    )  # fmt: skip
    return transformers.WhisperForConditionalGeneration(config)


def t5():
    config = transformers.T5Config(
        d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=PAD,
        relative_attention_num_buckets=8, relative_attention_max_distance=16, **IDS,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def vit():
    config = transformers.ViTConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        image_size=16, patch_size=8, num_labels=5,
    )  # fmt: skip
    return transformers.ViTForImageClassification(config)


MODELS = (bert, gpt2, llama, marian, whisper, t5, vit)
GENERATING = (gpt2, llama, marian, whisper, t5)


def build(make):
    """In eval, so that no dropout falls; weights large enough for attention to matter."""
    torch.manual_seed(1)
    model = make().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4)
    return model


def make_inputs(model, padding="right"):
    """Arguments of the model, and where its output stands at real positions."""
    inputs = Inputs()
    kind = model.config.model_type
    tokens = inputs.integers(2, PAD, 3, LENGTH)
    mask = torch.ones(3, LENGTH, dtype=torch.long)
    for row, length in enumerate((LENGTH, 4, 2)):
        mask[row, length:] = 0
    if padding == "left":
        mask = mask.flip(1)
    tokens[mask == 0] = PAD
    given = {"input_ids": tokens, "attention_mask": mask}
    real = mask.bool()
    if kind == "whisper":
        given = {"input_features": inputs.normal(3, 8, 32)}
    if kind == "vit":
        return {"pixel_values": inputs.normal(3, 3, 16, 16)}, torch.ones(3, dtype=torch.bool)
    if model.config.is_encoder_decoder:
        given["decoder_input_ids"] = inputs.integers(2, PAD, 3, 5)
        real = torch.ones(3, 5, dtype=torch.bool)
    return given, real


def run(model, implementation, dtype, given, real):
    """Logits at real positions and the gradients of every parameter."""
    model = copy.deepcopy(model).to(dtype)
    model.set_attn_implementation(implementation)
    given = {n: x.to(dtype) if x.is_floating_point() else x for n, x in given.items()}
    logits = model(**given).logits[real]
    logits.square().mean().backward()
    grads = {n: x.grad for n, x in model.named_parameters() if x.grad is not None}
    return {"logits": logits.detach(), **grads}


@pytest.fixture
def calls(monkeypatch):
    seen = []
    attend = integration.scaled_dot_product_attention

    def recording(*args, **kwargs):
        seen.append(args)
        return attend(*args, **kwargs)

    monkeypatch.setattr(integration, "scaled_dot_product_attention", recording)
    return seen


def layers(model):
    config = model.config
    if not config.is_encoder_decoder:
        return config.num_hidden_layers
    return 2 + 2 * 2  # encoder, decoder, and the decoder's attention to the encoder


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize("padding", ["right", "left"])
def test_outputs_and_gradients(calls, make, padding):
    model = build(make)
    given = make_inputs(model, padding)
    # Queries that are padding see no key; "eager" makes them NaN in float64, and then all others.
    exact = run(model, "eager" if padding == "right" else "sdpa", torch.float64, *given)
    peer = run(model, "sdpa", torch.float32, *given)
    assert not calls
    ours = run(model, "fastattn", torch.float32, *given)
    assert len(calls) == layers(model)
    assert ours.keys() == exact.keys()
    largest = max(x.abs().max().item() for n, x in exact.items() if n != "logits")
    sizes = {name: 0.0 if name == "logits" else largest for name in exact}
    names = tuple(exact)
    check_all(names, *(tuple(r[n] for n in names) for r in (ours, exact, peer)), sizes=sizes)


@pytest.mark.parametrize("make", GENERATING)
def test_generation_with_a_cache_gives_the_same_tokens(calls, make):
    model = build(make)
    given, _ = make_inputs(model, "left")
    given.pop("decoder_input_ids", None)
    given.update(max_new_tokens=6, min_new_tokens=6, do_sample=False)
    expected = model.generate(**given)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(model.generate(**given), expected)
    assert not calls
    model.set_attn_implementation("fastattn")
    torch.testing.assert_close(model.generate(**given), expected)
    assert len(calls) >= 6 * 2
    torch.testing.assert_close(model.generate(**given, use_cache=False), expected)
    beams = model.generate(**given, num_beams=3)
    model.set_attn_implementation("sdpa")
    torch.testing.assert_close(model.generate(**given, num_beams=3), beams)


@pytest.mark.parametrize("make", MODELS)
def test_training_with_dropout_repeats_with_the_seed(make):
    model = build(make).train()
    model.set_attn_implementation("fastattn")
    given, real = make_inputs(model)
    found = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        found.append(model(**given).logits[real])
    assert torch.equal(found[0], found[1])
    assert found[0].isfinite().all()


def test_attention_weights_are_returned():
    model = build(bert)
    given, _ = make_inputs(model)
    model.set_attn_implementation("eager")
    expected = model(**given, output_attentions=True).attentions
    model.set_attn_implementation("fastattn")
    found = model(**given, output_attentions=True).attentions
    torch.testing.assert_close(found, expected)


@pytest.mark.slow
def test_compiles_whole_for_all_lengths():
    model = build(llama)
    model.set_attn_implementation("fastattn")
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager", dynamic=True)
    for batch, length in ((2, 5), (3, 8)):
        tokens = Inputs().integers(2, PAD, batch, length)
        torch.testing.assert_close(
            compiled(tokens, use_cache=False).logits, model(tokens, use_cache=False).logits
        )


@pytest.mark.parametrize("name", ["softcap", "s_aux"])
def test_what_is_not_supported_is_refused(name):
    x = torch.ones(1, 2, 3, 4)
    with pytest.raises(ValueError, match=f"{name} is given: .*; a model without is accepted"):
        integration.attention(torch.nn.Module(), x, x, x, None, **{name: torch.ones(2)})


def test_a_bias_goes_with_every_mask():
    q, k, v = (Inputs(i).normal(2, 2, 3, 4) for i in range(3))
    bias = Inputs(3).normal(1, 2, 3, 3)
    keep = torch.ones(2, 1, 3, 3, dtype=torch.bool).tril()
    module = torch.nn.Module()
    causal = integration.attention(module, q, k, v, None, position_bias=bias)[0]
    masked = integration.attention(module, q, k, v, keep, position_bias=bias)[0]
    added = torch.zeros(2, 1, 3, 3).masked_fill(~keep, float("-inf"))
    summed = integration.attention(module, q, k, v, added, position_bias=bias)[0]
    torch.testing.assert_close(masked, causal)
    torch.testing.assert_close(summed, causal)
    expected = fastattn.scaled_dot_product_attention(q, k, v, bias, is_causal=True)
    torch.testing.assert_close(causal, expected.transpose(1, 2))
