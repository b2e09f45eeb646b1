"""README.md of a compressed checkpoint: what it is, what was measured, how to load it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, cast

from huggingface_hub import ModelCard, ModelCardData

from ...checkpoint.families import Family
from ...checkpoint.files import MAX_CHARACTERS, ROTOR_JSON, read_yaml
from ...checkpoint.layout import AttentionShape, LayerLayout
from ...checkpoint.schemas import CheckpointInfo, ModelInfo, SequenceInfo
from ...checkpoint.sizes import share_removed
from ...errors import RecipeError
from ...progress import in_bytes
from ...recipe.recipe import Recipe
from ...versions import pip_install
from ..evaluation.accuracy import Accuracy

REPEATED = ("license", "license_name", "license_link", "language")
"""Fields of a card's metadata that hold for what is made of the model, too."""


def model_card(
    report: CheckpointInfo,
    accuracy: Accuracy,
    recipe: Recipe,
    family: Family,
    shape: AttentionShape,
    apart: bool = False,
) -> str:
    """Markdown with a metadata block, from the content of rotor.json.

    Args:
        accuracy: that of rotor.json. family, shape: of the source.
        apart: the weights are not in the folder.
    """
    size = report["kv_bytes_per_token"]
    name = report["source"]["name"]
    share = report["compression"]
    held = report["kv_bytes_of_sequence"]
    source = report["source"]
    base_model = source.get("base_model") or source["hub_id"] or name
    name = markdown(name)
    measured = "\n".join(f"| {label} | {text} |" for label, text in accuracy.rows())
    metadata = ModelCardData(
        base_model=base_model,
        base_model_relation="quantized",
        library_name="transformers",
        pipeline_tag="text-generation" if family.auto_class == "AutoModelForCausalLM" else "image-text-to-text",
        tags=["rotor", "kv-cache", "compression"],
        **cast(dict[str, Any], source.get("card", {})),
    )
    weights = _where_weights_are(report["source"]) if apart else ""
    layouts = [LayerLayout.from_dict(layout, ROTOR_JSON) for layout in report["layouts"]]
    forms = sorted({layout.form.in_words(shape.layer(index)) for index, layout in enumerate(layouts)})
    sizes = sorted({layout.group_size for layout in layouts})
    merged = ""
    if not all(layout.has_value_projection(shape.layer(index)) for index, layout in enumerate(layouts)):
        merged = "Where keys and values share a latent, `k_proj` puts it out and there is no `v_proj`.\n"
    text = f"""# {name}, KV cache compressed by rotor

The weights of {name} with value, output and (where folded) key projections rotated and truncated.
{merged}{_sizes_in_words(report, layouts)}

| | |
|---|---|
| recipe | {markdown(recipe.name)}: {markdown(recipe.summary)} |
| form of stored keys | {" and ".join(forms)}, {" or ".join(map(str, sizes))} KV head(s) a group |
| compression planned, stored | {share["planned"]:.4f}, {share["stored"]:.4f} |
| KV bytes per token before, after | {size["before"]}, {size["after"]} |
| KV bytes of {held["tokens"]:,} tokens before, after | {held["before"]:,}, {held["after"]:,} |
{_states_row(report)}{_cache_row(report)}{measured}

{accuracy.note}
Not measured: other tasks, other languages, contexts longer than {recipe.evaluation.seq_len} tokens, and speed.
{_texts(report)}
## Load it

```python
import rotor  # {pip_install()}
from transformers import {family.auto_class}, AutoTokenizer

model = {family.auto_class}.from_pretrained("PATH_OF_THIS_FOLDER")
```

{weights}Without rotor transformers refuses this checkpoint. Programs that never import rotor load it where rotor is
installed, or below `rotor run -- PROGRAM`. `rotor validate` checks its integrity and its numbers;
`rotor.json` lists every tensor with its SHA-256, the ranks and the measurements; the kernels read `kernel_config.json`.

`manifest.json` has the SHA-256 of every file; its own is what `rotor export` prints with `-v`. With it from
somebody whom you trust, `sha256sum manifest.json` and `rotor validate PATH_OF_THIS_FOLDER` find any change at all.
"""
    return str(ModelCard(f"---\n{metadata.to_yaml()}\n---\n\n{text}"))


def _sizes_in_words(report: CheckpointInfo, layouts: Sequence[LayerLayout]) -> str:
    """Sizes of a token's rows and of a sequence's cache; each share is that of the two sizes beside it."""
    size, held = report["kv_bytes_per_token"], report["kv_bytes_of_sequence"]

    def less(before: float, after: float) -> str:
        return f"{100 * share_removed(before, after):.1f} % less"

    token = less(size["before"], size["after"])
    sequence = less(held["before"], held["after"])
    exact = max((layout.exact.slots for layout in layouts if layout.exact is not None), default=0)
    kept = f", the {exact} tokens that are kept exactly among them" if exact else ""
    return (
        f"A token's rows take {size['after']:,} bytes instead of {size['before']:,} ({token}).\n"
        f"The KV cache of a sequence of {held['tokens']:,} tokens{kept} takes {in_bytes(held['after'])} instead of "
        f"{in_bytes(held['before'])} ({sequence}).{_break_even(held)}"
    )


def _break_even(held: SequenceInfo) -> str:
    """From how many tokens on a cache is smaller, where short ones are not."""
    smaller = held["smaller_from"]
    if smaller is None:
        return f"\nSequences of up to {held['tokens']:,} tokens take no less than without rotor."
    return f"\nSequences of fewer than {smaller:,} tokens take more than without rotor." if smaller > 1 else ""


def _where_weights_are(source: ModelInfo) -> str:
    where = f"{source['hub_id']} at revision {source['revision']}" if source["hub_id"] else source["name"]
    return (
        f"This folder has no weights: they are those of {markdown(where)}, found, checked by their SHA-256 and "
        "rewritten while they load.\nWhere they are elsewhere, set `ROTOR_SOURCE` to their folder or hub id. "
        "`rotor materialise PATH_OF_THIS_FOLDER -o FULL` writes a\nfolder with weights.\n\n"
    )


def _texts(report: CheckpointInfo) -> str:
    """Section with both models' answers to the prompts."""
    if not report.get("texts"):
        return ""
    parts = ["\n## Before and after\n\nGreedy, to two fixed prompts whose beginnings the cache keeps compressed.\n"]
    for text in report["texts"]:
        asked = [line for line in text["prompt"].splitlines() if line.strip()][-2:]
        lines = [
            f"> ... {markdown(' '.join(asked))} ({text['prompt_tokens']} tokens)",
            f"**Before:** {markdown(text['before'].strip())}",
            f"**After:** {markdown(text['after'].strip())}",
        ]
        parts.append("\n" + "\n\n".join(lines) + "\n")
    return "".join(parts)


def _states_row(report: CheckpointInfo) -> str:
    size_bytes = report["source"]["state_bytes"]
    return f"| bytes of a sequence's other states, which stay as they are | {size_bytes:,} |\n" if size_bytes else ""


def _cache_row(report: CheckpointInfo) -> str:
    if "cache" not in report:
        return ""
    cache = report["cache"]
    sizes = ", ".join(f"{size:.1f} at {tokens} tokens" for tokens, size in cache["kv_bytes_per_token"].items())
    return f"| cache policy | {markdown(cache['policy']['method'])}; bytes a token with it: {sizes} |\n"


def markdown(text: str) -> str:
    """Text of unknown origin so that Markdown, and HTML in it, shows it as it is, on one line."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return re.sub(r"([\\`*_\[\]<>&|~$#!])", r"\\\1", line)


def repeated_metadata(folder: Path) -> dict[str, str | list[str]]:
    """The fields of REPEATED in the metadata of a model's README.md; nothing where it has none that can be read."""
    path = folder / "README.md"
    if not path.is_file():
        return {}
    text = path.read_bytes()[:MAX_CHARACTERS].decode("utf-8", "replace")
    begin, separator, rest = text.partition("---\n")
    block, end, _ = rest.partition("\n---")
    if begin.strip() or not separator or not end:
        return {}
    try:
        metadata = read_yaml(block, str(path))
    except RecipeError:
        return {}
    fields = metadata if isinstance(metadata, dict) else {}
    return {name: fields[name] for name in REPEATED if _is_text(fields.get(name))}


def _is_text(value: object) -> bool:
    """Tell whether a value is text, or a list of texts."""
    items = value if isinstance(value, list) else [value]
    return bool(items) and all(isinstance(item, str) and item.isprintable() and len(item) < 200 for item in items)
