"""Differences between families: capture, fused projections, partial rotary, soft caps, experts, refusals."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.compare import relative_error
from support.paths import ROOT
from support.quick import mostly_nightly
from support.runs import calibrated, in_memory
from support.tiny_models import ALIKE, CONFIGS, NO_ROPE, tiny_config
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward

from rotor import export, validate
from rotor.calibration.capture import capture
from rotor.calibration.moments import stored_name
from rotor.checkpoint.families import FAMILIES, MULTIMODAL, attention_shape, find_family
from rotor.checkpoint.layout import pre_rope
from rotor.checkpoint.projections import kv_parameters, read_attention
from rotor.errors import UnsupportedModelError
from rotor.kernels.reference.attention import dense_attention
from rotor.kernels.rotary import rotate
from rotor.models.loading import load_model
from rotor.models.source import Checkpoint

PROMPT = torch.randint(1, 4096, (2, 20), generator=torch.Generator().manual_seed(5))


def load_tiny(folder: Path):
    return load_model(folder, torch.device("cpu"), torch.float32)


@pytest.mark.parametrize("name", CONFIGS)
def test_capture_sees_what_attention_computes(name: str, tiny) -> None:
    """The logits do not change; keys after RoPE are those before it, rotated; W_o of the outputs is what is put out."""
    model = load_tiny(tiny(name))
    checkpoint = Checkpoint(tiny(name))
    family, shape = find_family(checkpoint.config), attention_shape(checkpoint.config)
    seen: dict[int, dict[str, torch.Tensor]] = {}
    inputs, outputs = {}, {}

    def record(layer: int):
        def hook(module, args, kwargs, output) -> None:
            inputs[layer] = args[0] if args else kwargs["hidden_states"]
            outputs[layer] = output[0]

        return hook

    handles = [
        family.attention_module(model, i).register_forward_hook(record(i), with_kwargs=True)
        for i in range(shape.num_layers)
    ]
    size, before = shape.num_kv_heads, stored_name(pre_rope(shape))
    wanted = frozenset({"query", "key_post", before, "value", "output"})
    with torch.inference_mode():
        expected = model(PROMPT, use_cache=False).logits
        attended = dict(outputs)
        with capture(model, family, shape, size, wanted, seen.__setitem__):
            got = model(PROMPT, use_cache=False).logits
        assert relative_error(got, expected) < 1e-5
        assert torch.equal(model(PROMPT, use_cache=False).logits, expected)  # nothing is left behind
    for handle in handles:
        handle.remove()
    assert seen.keys() == attended.keys() == set(range(shape.num_layers))
    positions = torch.arange(PROMPT.shape[1])[None]
    for layer, activations in seen.items():
        weights = read_attention(family, layer, checkpoint.names, checkpoint.tensor, shape)
        hidden = inputs[layer].flatten(0, 1)
        value = torch.nn.functional.linear(hidden, weights.v_weight, weights.v_bias)
        assert relative_error(activations["value"].flatten(1), value) < 1e-5
        key = activations[before]
        if family.rotary is not None:
            kind = family.rotary_type(model.config, layer)
            rotary = model.get_submodule(family.rotary)
            cos, sin = rotary(hidden, positions, *([] if kind is None else [kind]))
            key = rotate(key.unflatten(0, PROMPT.shape).transpose(1, 2), cos, sin).transpose(1, 2).flatten(0, 1)
        assert relative_error(activations["key_post"], key) < 1e-5
        # Of the group's stacked values each query head's own block is what o_proj receives.
        heads = torch.arange(shape.num_heads)
        own = activations["output"].unflatten(-1, (size, -1))[:, heads, heads // shape.heads_per_kv]
        put_out = torch.nn.functional.linear(own.flatten(1), weights.o_weight, weights.o_bias)
        assert relative_error(put_out, attended[layer].flatten(0, 1)) < 1e-5


@pytest.mark.parametrize("name", CONFIGS)
def test_layers_are_as_the_family_says(name: str, tiny) -> None:
    """Output of a layer, and places of W_k and W_v."""
    model, checkpoint = load_tiny(tiny(name)), Checkpoint(tiny(name))
    family = find_family(model.config)
    weights = read_attention(family, 1, checkpoint.names, checkpoint.tensor, attention_shape(model.config))
    for (parameter, part), expected in zip(
        kv_parameters(family, model, 1), (weights.k_weight, weights.v_weight), strict=True
    ):
        assert torch.equal(part(parameter), expected)
    kinds = []
    layers = model.get_submodule(f"{family.decoder}.{family.layers}")
    for layer in layers:
        layer.register_forward_hook(lambda module, args, output: kinds.append(isinstance(output, tuple)))
    model.get_submodule(family.decoder)(PROMPT, use_cache=False)
    assert kinds == [family.layer_returns_tuple] * len(layers)


@pytest.mark.parametrize("seq_len", [1, 5])
@pytest.mark.parametrize("masked", ["none", "bool", "float"])
def test_soft_capped_attention(seq_len: int, masked: str) -> None:
    """Against transformers' own, in prefill and decoding; without a mask it is causal."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(2, n, length, 8, generator=generator) for n, length in ((4, seq_len), (2, 5), (2, 5))
    )
    allowed = torch.ones(seq_len, 5, dtype=torch.bool).tril(5 - seq_len)
    if masked != "none":
        allowed = allowed & (torch.rand(2, 1, seq_len, 5, generator=generator) < 0.7)
        allowed[..., 0] = True
    added = torch.zeros(allowed.shape).masked_fill(~allowed, torch.finfo(torch.float32).min)
    mask = {"none": None, "bool": allowed, "float": added}[masked]
    module = torch.nn.Module().eval()
    module.num_key_value_groups = 2
    expected = eager_attention_forward(module, query, key, value, added, scaling=0.7, softcap=1.5)[0]
    torch.testing.assert_close(dense_attention(query, key, value, 0.7, mask, softcap=1.5), expected.flatten(2))


def test_soft_cap_matters(tiny, tmp_path: Path) -> None:
    """A tiny gemma2 whose logits reach the cap: without it the model is another one."""
    folder = shutil.copytree(tiny("gemma2"), tmp_path / "uncapped")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"attn_logit_softcapping": None}))
    with torch.inference_mode():
        assert relative_error(load_tiny(folder)(PROMPT).logits, load_tiny(tiny("gemma2"))(PROMPT).logits) > 1e-2


@pytest.mark.parametrize("name", ["mixtral", "qwen2_moe", "qwen3_moe"])
def test_experts_are_copied_and_fused_at_load(name: str, tiny, tmp_path: Path) -> None:
    """The checkpoint keeps one tensor an expert; loading with rotor's quantizer fuses them as transformers does."""
    run = calibrated(tiny(name), tmp_path / "run", "pre", 1)
    export(run.folder, tmp_path / "out", compression=0.4)
    source, written = (load_file(folder / "model.safetensors") for folder in (tiny(name), tmp_path / "out"))
    experts = [key for key in source if ".experts." in key]
    assert len(experts) >= 4 * 3  # one layer or two, four experts, three matrices each
    others = [key for key in source if ".self_attn." not in key]
    assert all(torch.equal(source[key], written[key]) for key in others)
    model, report = AutoModelForCausalLM.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not any(report[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    base = load_tiny(tiny(name))
    loaded = dict(model.named_parameters())
    fused = {key: p for key, p in base.named_parameters() if ".experts." in key}
    assert all(torch.equal(loaded[key], p) for key, p in fused.items())
    assert {p.dim() for p in fused.values()} == {3}


def test_frequencies_that_depend_on_the_length_ignore_the_rest_of_a_static_cache(tiny, tmp_path: Path) -> None:
    """phi3's longrope changes its frequencies beyond 128 tokens: those present, not those that the cache can hold."""
    run = calibrated(tiny("phi3"), tmp_path / "run", "pre", 1)
    export(run.folder, tmp_path / "out", compression=0.4)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    with torch.inference_mode():
        expected = model(PROMPT, past_key_values=DynamicCache(config=model.config)).logits
        cache = StaticCache(config=model.config, max_cache_len=200)
        parts = [model(PROMPT[:, a:b], past_key_values=cache).logits for a, b in ((0, 12), (12, 13), (13, 20))]
    assert relative_error(torch.cat(parts, dim=1), expected) < 1e-5
    network = in_memory(run)
    full = [[(96, 96)] * 2] * 2
    long = torch.randint(1, 4096, (1, 140), generator=torch.Generator().manual_seed(6))
    with torch.inference_mode():
        expected = network.model(long).logits
        assert relative_error(network.compress(run.bases(), full)(long).logits, expected) < 1e-5


@pytest.mark.parametrize("name", mostly_nightly(["gpt2", "opt"], lambda name: name == "gpt2"))
def test_a_checkpoint_of_the_model_without_its_head(name: str, tiny, tmp_path: Path) -> None:
    """Names without the base model's prefix (as in the original GPT-2), and buffers that transformers ignores."""
    source = shutil.copytree(tiny(name), tmp_path / "model")
    prefix = find_family(CONFIGS[name]()).decoder.split(".")[0] + "."
    tensors = {key.removeprefix(prefix): t for key, t in load_file(source / "model.safetensors").items()}
    if name == "gpt2":
        tensors |= {f"h.{i}.attn.bias": torch.ones(1, 1, 8, 8) for i in range(2)}
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    run = calibrated(source, tmp_path / "run", "post", 1)
    export(run.folder, tmp_path / "out", compression=0.4)
    plain = calibrated(tiny(name), tmp_path / "run-plain", "post", 1)
    export(plain.folder, tmp_path / "out-plain", compression=0.4)
    models = [load_tiny(tmp_path / out) for out in ("out", "out-plain")]
    with torch.inference_mode():
        assert torch.equal(*(model(PROMPT).logits for model in models))
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as file:
        assert not [key for key in file.keys() if key.startswith(prefix)]  # noqa: SIM118 (not a dict)
    result = validate(tmp_path / "out")
    assert not result.damaged, [c for c in result.checks if c.status == "fail"]


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("gpt2", {"reorder_and_upcast_attn": True}, "reorder_and_upcast_attn is set"),
        ("gpt2", {"add_cross_attention": True}, "add_cross_attention is set"),
        ("falcon", {"alibi": True}, "alibi is set"),
        ("cohere", {"use_qk_norm": True}, "use_qk_norm is set"),
        ("olmoe", {"clip_qkv": 8.0}, "clip_qkv is set"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "use_bidirectional_attention is set"),
        ("gpt_neox", {"rotary_pct": 0.0}, "partial_rotary_factor is 0.0, expected above 0"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
            "partial_rotary_factor is 0.5; for llama",
        ),
        ("llama", {"is_encoder_decoder": True}, "'llama' is not supported: it is an encoder and a decoder."),
        ("llama", {"model_type": "bloom"}, "'bloom' is not supported.\ndocs/families.md lists the "),
        ("llama", {"model_type": "bert"}, "'bert' is not supported: it is an encoder, which keeps no cache."),
    ],
)
def test_what_is_not_supported_is_refused_by_name(name: str, change: dict, message: str, tmp_path: Path) -> None:
    """Before any work: the folder has no weights."""
    settings = tiny_config(name).to_dict() | change
    if "rotary_pct" in change:
        del settings["rope_parameters"]
    (tmp_path / "config.json").write_text(json.dumps(settings))
    save_file({"x": torch.zeros(1)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(UnsupportedModelError) as error:
        find_family(Checkpoint(tmp_path).config)
    assert message in str(error.value)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("DeepseekV2Config", "its cache is a latent already (multi-head latent attention).\nServe it as it is."),
        ("DeepseekV3Config", "its cache is a latent already"),
        ("MiniCPM3Config", "its cache is a latent already"),
        ("KimiLinearConfig", "its cache is a latent already"),
        ("MambaConfig", "it keeps a state of fixed size, not keys and values.\nServe it as it is."),
        ("RwkvConfig", "it keeps a state of fixed size"),
        ("T5Config", "it is an encoder and a decoder.\nrotor compresses models that are decoders alone."),
        ("BartConfig", "it is an encoder and a decoder."),
        ("LlavaConfig", "it reads more than text, by a language model 'llama'.\nSave its language model as a model"),
        ("Gemma3nConfig", "several streams of hidden states"),
        ("Gemma3nTextConfig", "several streams of hidden states"),
        ("Qwen3VLTextConfig", "model_type 'qwen3_vl_text' is not supported"),
    ],
)
def test_models_that_keep_no_keys_and_values_of_their_own_are_refused_with_a_reason(config: str, message: str) -> None:
    with pytest.raises(UnsupportedModelError) as error:
        find_family(getattr(transformers, config)())
    assert message in str(error.value)


def test_a_model_around_a_language_model_that_is_not_supported_is_refused() -> None:
    config = transformers.Mistral3Config(text_config={"model_type": "bloom"})
    with pytest.raises(UnsupportedModelError, match="a mistral3 with a language model 'bloom' is not supported"):
        find_family(config)


def test_every_supported_family_is_tested_and_named() -> None:
    lines = (ROOT / "docs" / "families.md").read_text().splitlines()
    named = {name for line in lines if line.startswith("| ") for name in re.findall(r"\w+", line.split("|")[1])}
    assert {*FAMILIES, *MULTIMODAL} <= named
    assert f"{len(FAMILIES) + len(MULTIMODAL)} model types" in (ROOT / "README.md").read_text()
    assert {config().model_type for config in CONFIGS.values()} | ALIKE.keys() == set(FAMILIES)
    assert {name for name in CONFIGS if find_family(CONFIGS[name]()).rotary is None} == NO_ROPE
