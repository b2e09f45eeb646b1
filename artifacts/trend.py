"""Table and plot of what rotor brings by a model's shape and spectra.

    python artifacts/trend.py artifacts/studies/trend/bundled artifacts/studies/trend/reference

Each folder has the model's config.json, spectra.json (`artifacts/spectra.py --json`), caches.csv of a study of the part
artifacts/studies/fair.py:Fair, and the rotor.json of exports, as RECIPE.json. Writes trend.png beside the folders.
"""

from __future__ import annotations

import argparse
import csv
import json
from dataclasses import dataclass
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from reference import markdown, shape_line

BEATEN = ("per token, 4 bits", "GEAR-4", "KIVI-4")
LADDER = ("palu-codes", "fisher-codes", "rotor", "rotor-a-head")
RECIPES = ("rotor", "palu-codes", "zack", "palu", "fdc")


@dataclass(frozen=True)
class Model:
    """share: hidden size over a layer's keys and values. used: what part of these holds 99 % of the energy. kl: of each
    cache by its bytes. exports: by recipe."""

    name: str
    config: dict
    share: float
    used: float
    kl: dict[str, dict[float, float]]
    exports: dict[str, dict]

    @classmethod
    def read(cls, folder: Path) -> Model:
        config = json.loads((folder / "config.json").read_text())
        width = 2 * config["num_key_value_heads"] * config["head_dim"]
        kl: dict[str, dict[float, float]] = {}
        with (folder / "caches.csv").open() as file:
            for row in csv.DictReader(file):
                name, _, size = row["name"].removesuffix(" bytes").rpartition(", ")
                if not row["name"].endswith(" bytes"):
                    name, size = row["name"], row["mean_kv_bytes_per_token"]
                if row["kl_div"]:
                    kl.setdefault(name, {})[float(size)] = float(row["kl_div"])
        exports = {path.stem: json.loads(path.read_text()) for path in folder.glob("*.json") if path.stem in RECIPES}
        layers = json.loads((folder / "spectra.json").read_text())
        used = sum(alike for *_, alike in layers) / len(layers) / width
        return cls(folder.name, config, config["hidden_size"] / width, used, kl, exports)

    def bytes_at(self, recipe: str, kl: float) -> float | None:
        """Bytes at which a recipe loses so much, between those that were measured; None beyond them."""
        size, lost = (np.array(side) for side in zip(*sorted(self.kl[recipe].items()), strict=True))
        if not lost.min() <= kl <= lost.max():
            return None
        return float(np.exp(np.interp(-np.log(kl), -np.log(lost), np.log(size))))


def cell(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def tables(models: list[Model]) -> str:
    names = [f"{m.name} ({m.share:.2f}, {m.used:.2f})" for m in models]
    searched = [
        [f"`{recipe}`", *(_exported(m.exports.get(recipe)) for m in models)]
        for recipe in RECIPES
        if any(recipe in m.exports for m in models)
    ]
    sizes = sorted(set.intersection(*(set(m.kl["rotor"]) for m in models)))
    ladder = [
        [f"`{recipe}`", f"{size:g}", *(cell(m.kl.get(recipe, {}).get(size), ".4f") for m in models)]
        for size in sizes[:3]
        for recipe in LADDER
    ]
    equal = []
    for cache in BEATEN:
        cells = []
        for m in models:
            ((size, lost),) = m.kl[cache].items()
            found = m.bytes_at("rotor", lost)
            kept = f"less than {min(m.kl['rotor']):g}" if found is None else f"{found:.0f}"
            cells.append(f"KL {lost:.4f}: {kept} for {size:.0f}")
        equal.append([cache, *cells])
    parts = [
        "\n".join(f"- {m.name}: {shape_line(m.config)}" for m in models),
        "In brackets: hidden size over keys and values, and the share of these that holds 99 % of the energy.",
        markdown(["removed at 0.99 (report)", *names], searched),
        markdown(["KL at equal bytes", "bytes", *names], ladder),
        markdown(["bytes of `rotor` at the KL of", *names], equal),
    ]
    return "\n\n".join(parts)


def _exported(about: dict | None) -> str:
    if about is None:
        return ""
    size, accuracy = about["kv_bytes_per_token"], about["accuracy"]
    return f"{1 - size['after'] / size['before']:.3f} ({accuracy['report']:.3f})"


def plot(models: list[Model], path: Path) -> None:
    """Against the share of channels that are used, joined by lines, and against shape and size, by marks alone."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 4), sharey=True)
    places = {
        "share of channels with 99 % of the energy": [m.used for m in models],
        "hidden size over a layer's keys and values": [m.share for m in models],
        "M parameters": [_parameters(m.config) / 1e6 for m in models],
    }
    for axis, line, (label, at) in zip(axes, ("-", "", ""), places.items(), strict=True):
        for recipe, marker in zip(LADDER, "vsDPo^x", strict=True):
            size = sorted(models[0].kl["rotor"])[1]
            points = [(x, m.kl[recipe][size]) for x, m in zip(at, models, strict=True) if size in m.kl.get(recipe, {})]
            axis.plot(
                *zip(*sorted(points), strict=True), marker=marker, linestyle=line, label=f"{recipe}, {size:g} bytes"
            )
        quantised = [(x, next(iter(m.kl[BEATEN[0]].values()))) for x, m in zip(at, models, strict=True)]
        axis.plot(
            *zip(*sorted(quantised), strict=True), "k_", linestyle=line and "--", label="4 bits a token, 720 bytes"
        )
        axis.set(xlabel=label, yscale="log")
    axes[0].set_ylabel(f"KL on held-out text, {size:g} bytes (4 bits a token: 720)")
    axes[-1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    figure.savefig(path, dpi=130, bbox_inches="tight")


def _parameters(config: dict) -> int:
    hidden, dim = config["hidden_size"], config["head_dim"]
    heads = config["num_attention_heads"] + config["num_key_value_heads"]
    layer = 2 * heads * dim * hidden + 3 * hidden * config["intermediate_size"]
    return config["vocab_size"] * hidden + config["num_hidden_layers"] * layer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folders", type=Path, nargs="+")
    folders = parser.parse_args().folders
    models = sorted(map(Model.read, folders), key=lambda m: m.used)
    print(tables(models))
    plot(models, folders[0].parent / "trend.png")


if __name__ == "__main__":
    main()
