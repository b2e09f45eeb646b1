"""What users of transformers do with a checkpoint beside generating: it works, or says why it does not."""

from __future__ import annotations

import logging
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from support.paths import ROOT
from support.runs import calibrated
from transformers import AutoModel, AutoModelForCausalLM

from rotor.errors import UsageError
from rotor.search.export.export import export

FAMILIES = ["llama", "opt", "gpt_neox", "gpt2", "falcon", "gemma3_text"]


@pytest.fixture(scope="module")
def exported(tiny, tmp_path_factory: pytest.TempPathFactory):
    """exported(family) -> a checkpoint of a tiny model."""
    built: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in built:
            folder = tmp_path_factory.mktemp("transformers")
            run = calibrated(tiny(family), folder / "run", "post", 1)
            built[family] = export(run.folder, folder / "out", compression=0.3, measure=False).folder
        return built[family]

    return get


@pytest.mark.nightly
@pytest.mark.parametrize("order", ["import transformers.quantizers.auto, rotor", "import rotor"])
def test_what_asks_for_the_quantisation_before_it_loads_finds_rotor(order: str) -> None:
    """As lm-eval's `hf` model does."""
    program = f"""
{order}
from transformers.quantizers.auto import AutoQuantizationConfig
print(type(AutoQuantizationConfig.from_dict({{"quant_method": "rotor"}})).__name__)
from transformers import AutoModelForCausalLM
"""
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, env={"PYTHONPATH": str(ROOT)}
    )
    assert done.stdout.strip() == "RotorConfig", done.stderr


@pytest.mark.parametrize("family", FAMILIES)
def test_the_base_model_alone(exported, family: str) -> None:
    tokens = torch.arange(24).reshape(2, 12)
    whole = AutoModelForCausalLM.from_pretrained(exported(family))
    base = AutoModel.from_pretrained(exported(family))
    with torch.inference_mode():
        expected = whole(tokens, output_hidden_states=True).hidden_states[-1]
        got = base(tokens).last_hidden_state
    torch.testing.assert_close(got, expected)


def test_another_attention_is_ignored_with_a_warning(exported, caplog: pytest.LogCaptureFixture) -> None:
    folder = exported("llama")
    caplog.clear()
    with caplog.at_level(logging.WARNING, "rotor"):
        AutoModelForCausalLM.from_pretrained(folder)
        assert caplog.messages == []
        AutoModelForCausalLM.from_pretrained(folder, attn_implementation="flash_attention_2")
    assert "attn_implementation='flash_attention_2' is ignored" in caplog.text


def test_attention_weights_are_refused(exported) -> None:
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    with pytest.raises(UsageError, match="output_attentions: compressed layers keep no attention weights"):
        model(torch.arange(5)[None], output_attentions=True)


def test_another_dtype_is_given_when_a_model_loads(exported, tiny) -> None:
    """The methods that transformers refuses of quantised models say how; other models keep them."""
    model = AutoModelForCausalLM.from_pretrained(exported("llama"))
    for convert, name in ((model.half, "float16"), (model.float, "float32")):
        with pytest.raises(
            UsageError, match=rf"^\.{convert.__name__}\(\): a compressed model gets its dtype"
        ) as caught:
            convert()
        assert caught.value.hint == f"from_pretrained(FOLDER, dtype=torch.{name})"
    assert AutoModelForCausalLM.from_pretrained(exported("llama"), dtype=torch.float16).dtype == torch.float16
    assert AutoModelForCausalLM.from_pretrained(tiny("llama")).half().dtype == torch.float16
