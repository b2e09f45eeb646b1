"""README.md of a compressed checkpoint: what it is, what was measured, how to load it."""

from __future__ import annotations

import re
from typing import Any

import yaml

from .manifest import NO_DIGEST
from .metrics import describe
from .recipe import Recipe


def model_card(report: dict[str, Any], recipe: Recipe) -> str:
    """Markdown with a metadata block, from the content of rotor.json."""
    accuracy, size, name = report["accuracy"], report["kv_bytes_per_token"], report["source"]["name"]
    measured = accuracy["measurements"]["report"]
    base = accuracy["base"]["report"] or {}
    interval = ", no interval"
    if accuracy["interval_95"] is not None:
        interval = ", 95 % interval {:.4f} to {:.4f}".format(*accuracy["interval_95"])
    target = "none was set" if accuracy["target"] is None else f"{accuracy['target']}"
    base_model, name = report["source"]["hub_id"] or name, markdown(name)
    metadata = {
        "base_model": base_model,
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "tags": ["rotor", "kv-cache", "compression"],
    }
    metric, layouts = accuracy["metric"], report["layouts"]
    domains = sorted({layout["domain"] for layout in layouts})
    sizes = sorted({len(layout["groups"][0]["kv_heads"]) for layout in layouts})
    return f"""---
{yaml.safe_dump(metadata, sort_keys=False).strip()}
---

# {name}, KV cache compressed by rotor

The weights of {name} with value, output and (where folded) key projections rotated and truncated. The KV cache
holds {size["after"]} instead of {size["before"]} bytes per token ({100 * report["compression"]["stored"]:.1f} % less).

| | |
|---|---|
| recipe | {markdown(recipe.name)}: {markdown(recipe.summary)} |
| keys compressed | {" and ".join(_domain(d) for d in domains)}, {" or ".join(map(str, sizes))} KV head(s) a group |
| compression planned, stored | {report["compression"]["planned"]:.4f}, {report["compression"]["stored"]:.4f} |
| KV bytes per token before, after | {size["before"]}, {size["after"]} |
| accuracy ({metric}) | {accuracy["report"]:.4f}{interval}; target: {target} |
| next-token accuracy ratio | {measured["token_accuracy"]:.4f} |
| perplexity ratio (base over compressed) | {measured["ppl_ratio"]:.4f}, base {base.get("perplexity", 0):.3f} |
| measured on | {accuracy["data"]}, {base.get("tokens", 0)} predicted tokens that the search did not choose by |

Accuracy is {describe(metric)}.
Not measured: other tasks, other languages, contexts longer than {recipe.evaluation.seq_len} tokens, and speed.

## Load it

```python
import rotor  # pip install rotor-kv
from transformers import AutoModelForCausalLM, AutoTokenizer

model = AutoModelForCausalLM.from_pretrained("PATH_OF_THIS_FOLDER")
```

Without `import rotor` transformers cannot run this checkpoint. `rotor validate` checks its integrity and its numbers;
`rotor.json` lists every tensor with its SHA-256, the ranks and the measurements; the kernels read `kernel_config.json`.

`manifest.json` has the SHA-256 of every file. That of `manifest.json` itself, as it was written, is the digest

```
{NO_DIGEST}
```

With the digest from somebody whom you trust, `rotor validate PATH_OF_THIS_FOLDER --digest HEX` finds any change at all.
"""


def markdown(text: str) -> str:
    """Text of unknown origin so that Markdown, and HTML in it, shows it as it is, on one line."""
    line = "".join(character if character.isprintable() else " " for character in text)
    return re.sub(r"([\\`*_\[\]<>&|~$#!])", r"\\\1", line)


def _domain(domain: str) -> str:
    return {
        "post": "after RoPE (never rebuilt)",
        "pre": "before RoPE (rebuilt inside attention)",
        "none": "in place (the model has no RoPE)",
    }[domain]
