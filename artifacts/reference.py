"""A table of models by shape: what recipes remove at a target, and rotor's KL against quantised caches at their bytes.

    make reference MODEL=artifacts/demo-model
    python artifacts/reference.py out/reference-rotor ... --study runs/reference-study

Every folder is an export, whose rotor.json has its bytes and accuracy; the study is one of the part
artifacts/studies/fair.py:Fair.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path


def export_row(folder: Path) -> list[str]:
    """Row of an export: recipe, bytes a token, share removed, report and its interval, KL."""
    about = json.loads((folder / "rotor.json").read_text())
    size, accuracy = about["kv_bytes_per_token"], about["accuracy"]
    low, high = accuracy["interval_95"]
    return [
        f"`{about['recipe']}`",
        f"{accuracy['target']}",
        f"{size['after']:g} of {size['before']:g}",
        f"{1 - size['after'] / size['before']:.3f}",
        f"{accuracy['report']:.4f} [{low:.4f}, {high:.4f}]",
        f"{accuracy['measurements']['report']['values']['kl_div']:.4f}",
    ]


def shape_line(config: dict) -> str:
    """Parameters do not tell what rank a joint latent has for free; hidden size over keys and values does."""
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    dim = config.get("head_dim") or config["hidden_size"] // heads
    width = 2 * kv_heads * dim
    layers, hidden = config["num_hidden_layers"], config["hidden_size"]
    return (
        f"{config['model_type']}: {layers} layers, hidden size {hidden} against {width} keys and values a layer "
        f"({hidden / width:.2f}), {heads} query and {kv_heads} KV heads of {dim}"
    )


def markdown(header: list[str], rows: list[list[str]]) -> str:
    return "\n".join(f"| {' | '.join(row)} |" for row in [header, ["---"] * len(header), *rows])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("exports", type=Path, nargs="+")
    parser.add_argument("--study", type=Path)
    given = parser.parse_args()
    print(shape_line(json.loads((given.exports[0] / "config.json").read_text())))
    rows = [export_row(folder) for folder in given.exports if (folder / "rotor.json").is_file()]
    print(markdown(["recipe", "target", "bytes a token", "removed", "report [95 %]", "KL"], rows))
    if given.study:
        print((given.study / "summary.md").read_text().partition("## ")[2])


if __name__ == "__main__":
    main()
