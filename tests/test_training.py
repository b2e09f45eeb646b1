"""Fine-tuning of a compressed checkpoint: gradients are those of what it computes, or training is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from support.compare import relative_error
from support.folded_models import MIXED, Folding, write_pair
from support.runs import calibrated
from transformers import AutoModelForCausalLM, Trainer, TrainingArguments, trainer_utils
from transformers.utils import is_accelerate_available

from rotor import export
from rotor.errors import UsageError

CASES = {
    "llama-post": ("llama", "post", 1),
    "llama-pre": ("llama", "pre", 2),
    "llama-block": ("llama", "block", 2),
    "gemma3-pre": ("gemma3_text", "pre", "all"),
    "gpt2-none": ("gpt2", "post", 2),
}
TOKENS = (torch.arange(48).reshape(2, 24) * 37) % 4096


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory: pytest.TempPathFactory):
    """exported(case, removal rate) -> a checkpoint with rows of numbers."""
    runs: dict[str, Path] = {}

    def get(case: str, **goal: float) -> Path:
        family, domain, size = CASES[case]
        folder = tmp_path_factory.mktemp("training")
        if case not in runs:
            runs[case] = calibrated(tiny(family), folder / "run", domain, size).folder
        return export(runs[case], folder / "out", measure=False, **goal).folder

    return get


@pytest.fixture(scope="module")
def coded(tiny, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_pair(tiny("llama"), tmp_path_factory.mktemp("coded") / "out", Folding(group_size=2, bits=MIXED)).coded


def loss_of(model: Any) -> torch.Tensor:
    """In float64, where transformers' own is rounded to float32."""
    logits = model(TOKENS, use_cache=False).logits.double()
    return torch.nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), TOKENS[:, 1:].flatten())


@pytest.mark.parametrize("case", CASES)
def test_the_slope_along_a_direction_is_that_of_differences(case: str, exported) -> None:
    """Of all parameters at once: (L(w + h d) - L(w - h d)) / 2h against the gradient times d.

    Norms and RoPE of the models are float32 in any dtype, which bounds how small h may be.
    """
    model = AutoModelForCausalLM.from_pretrained(exported(case, compression=0.4), dtype=torch.float64)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    assert len(trained) > 10
    loss_of(model).backward()
    generator = torch.Generator().manual_seed(0)
    directions = [torch.randn(p.shape, generator=generator, dtype=p.dtype) * p.detach().std() for p in trained]
    assert all(p.grad is not None for p in trained)
    slope = sum(float((p.grad * d).sum()) for p, d in zip(trained, directions, strict=True) if p.grad is not None)
    step, losses = 1e-3, []
    with torch.no_grad():
        for sign in (1, -2):
            for parameter, direction in zip(trained, directions, strict=True):
                parameter.add_(direction, alpha=sign * step)
            losses.append(float(loss_of(model)))
    assert (losses[0] - losses[1]) / (2 * step) == pytest.approx(slope, rel=1e-2)


def test_with_all_columns_gradients_are_those_of_the_source(exported, tiny) -> None:
    """Of whatever compression leaves as it is: embeddings, norms, MLP."""
    source = AutoModelForCausalLM.from_pretrained(tiny("llama"), dtype=torch.float64)
    rotated = AutoModelForCausalLM.from_pretrained(exported("llama-pre", removal_rate=0.0), dtype=torch.float64)
    gradients = []
    for model in (source, rotated):
        loss_of(model).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    same = [name for name in gradients[0] if "self_attn" not in name]
    assert len(same) > 8
    for name in same:
        assert relative_error(gradients[1][name], gradients[0][name]) < 1e-4, name  # weights are float32 on disk


def test_trainers_take_what_has_gradients(exported, coded: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported("llama-post", compression=0.3))
    assert model.hf_quantizer.is_trainable
    check = getattr(trainer_utils, "validate_quantization_for_training", None)
    if check is not None:
        check(model)
    refused = AutoModelForCausalLM.from_pretrained(coded)
    assert not refused.hf_quantizer.is_trainable
    assert "caches codes, which have no gradients" in caplog.text
    if check is not None:
        with pytest.raises(ValueError, match="quantiz"):
            check(refused)


def test_a_loss_of_codes_has_no_gradient(coded: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(coded)
    loss = loss_of(model)
    with pytest.raises(UsageError, match=r"caches codes, which have no gradients(.|\n)*rotor-16"):
        loss.backward()


def test_lora_trains_and_merges(exported, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="peft is not installed")
    if not is_accelerate_available():
        pytest.skip("accelerate, which Trainer needs, is not installed")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_pretrained(exported("llama-pre", compression=0.3))
    before = float(loss_of(model).detach())
    adapted = peft.get_peft_model(
        model, peft.LoraConfig(r=4, target_modules=["q_proj", "k_proj", "v_proj", "o_proj"], task_type="CAUSAL_LM")
    )
    data = [{"input_ids": row, "labels": row} for row in TOKENS]
    settings = TrainingArguments(
        str(tmp_path), max_steps=10, learning_rate=1e-2, report_to=[], save_strategy="no", use_cpu=True
    )
    Trainer(adapted, settings, train_dataset=data).train()
    with torch.no_grad():
        trained = adapted.eval()(TOKENS).logits
        assert float(loss_of(adapted)) < before - 0.05
        merged = adapted.merge_and_unload()
        torch.testing.assert_close(merged(TOKENS).logits, trained, rtol=1e-4, atol=1e-4)
    merged.save_pretrained(tmp_path / "merged")
    again = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    with torch.no_grad():
        torch.testing.assert_close(again(TOKENS).logits, merged(TOKENS).logits)


def test_attention_dropout_is_said_not_to_be_applied(exported, caplog: pytest.LogCaptureFixture) -> None:
    """Once for a model, where training begins; not for one whose source has none."""
    model = AutoModelForCausalLM.from_pretrained(exported("gpt2-none", compression=0.4))
    assert model.config.attn_pdrop == 0.1
    caplog.clear()
    model.train()
    said = "attention_dropout=0.1 is not applied: compressed attention has no dropout."
    assert [said in record.message for record in caplog.records] == [True]
    model.train()
    assert len(caplog.records) == 1
    without = AutoModelForCausalLM.from_pretrained(exported("llama-post", compression=0.4))
    caplog.clear()
    without.train()
    assert not caplog.records


@pytest.mark.nightly
def test_a_compiled_model_gives_the_same_logits_and_gradients(coded: Path, exported) -> None:
    """Attention is left out of the graph; of codes gradients are refused as in a model that is not compiled."""
    for folder in (coded, exported("llama-pre", compression=0.4)):
        torch._dynamo.reset()
        model = AutoModelForCausalLM.from_pretrained(folder)
        compiled = torch.compile(model, backend="aot_eager")
        with torch.no_grad():
            expected = model(TOKENS, use_cache=False).logits
            assert relative_error(compiled(TOKENS, use_cache=False).logits, expected) < 1e-5
            with pytest.raises(Exception, match="attention of a compressed layer is left out of the graph"):
                torch.compile(model, backend="eager", fullgraph=True)(TOKENS, use_cache=False)
        loss = compiled(TOKENS, labels=TOKENS, use_cache=False).loss
        if folder == coded:
            with pytest.raises(UsageError, match="caches codes, which have no gradients"):
                loss.backward()
            continue
        loss.backward()
        found = model.get_input_embeddings().weight.grad.clone()
        model.zero_grad()
        model(TOKENS, labels=TOKENS, use_cache=False).loss.backward()
        assert relative_error(found, model.get_input_embeddings().weight.grad) < 1e-5
