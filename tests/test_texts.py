"""Texts of both models to fixed prompts, in the files of an export."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from support.pages import Page
from support.paths import DEMO_MODEL
from transformers import AutoModelForCausalLM, AutoTokenizer

from rotor import export
from rotor.errors import UsageError
from rotor.search.export.texts import NEW_TOKENS, PROMPTS


def written(folder: Path, prompts: Sequence[str]) -> list[str]:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(DEMO_MODEL)
    texts = []
    for prompt in prompts:
        inputs = tokenizer(prompt, return_tensors="pt")
        output = model.generate(**inputs, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)
        texts.append(str(tokenizer.decode(output[0, inputs["input_ids"].shape[1] :], skip_special_tokens=True)))
    return texts


def test_card_report_and_rotor_json_have_what_both_models_write(run_copy, tmp_path: Path) -> None:
    out = export(run_copy("fdc").folder, tmp_path / "out", compression=0.7, texts=True).folder
    texts = json.loads((out / "rotor.json").read_text())["texts"]
    assert [text["prompt"] for text in texts] == list(PROMPTS)
    assert all(text["prompt_tokens"] > 132 for text in texts)  # more than any recipe keeps exactly
    assert [text["before"] for text in texts] == written(DEMO_MODEL, PROMPTS)
    assert [text["after"] for text in texts] == written(out, PROMPTS)
    assert any(text["before"] != text["after"] for text in texts)
    page = Page((out / "report.html").read_text("utf-8")).text
    card = (out / "README.md").read_text("utf-8")
    assert "## Before and after" in card
    for text in texts:
        assert text["before"] in page
        assert text["after"] in page
    assert card.count("**Before:**") == card.count("**After:**") == len(PROMPTS)


def test_prompts_of_ones_own(run_copy, tmp_path: Path, caplog) -> None:
    """In place of the fixed ones, or behind them with --texts; one that is too long is left out and said."""
    prompts = ["import unittest", "x = " * 3000]
    out = export(run_copy("fdc").folder, tmp_path / "out", compression=0.7, prompts=prompts).folder
    (text,) = json.loads((out / "rotor.json").read_text())["texts"]
    assert text["prompt"] == prompts[0]
    assert [text["before"]] == written(DEMO_MODEL, prompts[:1])
    assert [text["after"]] == written(out, prompts[:1])
    assert "tokens is left out: the model has too few positions for it" in caplog.text


def test_what_cannot_write_texts_is_refused(run_copy, tmp_path: Path) -> None:
    run = run_copy("fdc").folder
    for more in ({"measure": False}, {"cache": "kivi-4"}):
        with pytest.raises(UsageError, match=r"^--texts and --(no-measure|cache): expected one of them"):
            export(run, tmp_path / "out", compression=0.5, texts=True, **more)
    with pytest.raises(UsageError, match="--prompt and --no-measure: expected one of them"):
        export(run, tmp_path / "out", compression=0.5, prompts=["x"], measure=False)
    for asked, option in (({"texts": True}, "--texts"), ({"prompts": ["x"]}, "--prompt")):
        with pytest.raises(UsageError, match=f"{option}: writing texts needs all weights in memory"):
            export(run, tmp_path / "out", compression=0.5, offload="always", **asked)
    assert not (tmp_path / "out").exists()
