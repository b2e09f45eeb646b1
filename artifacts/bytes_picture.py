"""Draw the README's picture: caches in use, and the bytes at which `rotor` is as good as each.

    python artifacts/bytes_picture.py                    # writes docs/bytes.svg

It shows what `rotor study MODEL --parts match` measured, as artifacts/studies/match-* have it, over sequences of 32,768
tokens with all exact tokens counted. As good is in all of KL, look-ups and copies: the bars of `rotor` are the most
bytes that one of them takes. To add a model, put its study there and its name into MODELS.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]

OUT = ROOT / "docs" / "bytes.svg"

MODELS = {
    "Qwen2.5-Coder 1.5B": "match-qwen-1.5b",
    "Qwen2.5-Coder 0.5B": "match-qwen-0.5b",
    "Gemma 3 270M": "match-gemma3",
    "SmolLM2 135M": "match-smollm2",
}
"""Folders in artifacts/studies by the name that the picture gives them; those that are not there are left out."""

CACHES = {"fp8, one scale": "fp8", "KIVI-4": "KIVI, 4 bits", "KVTC-4": "KVTC, 4 bits"}
"""Lines that are drawn of a study, with the words for them."""

RECIPE, CONTEXT = "rotor", 32_768

WIDTH, BAR, GAP, TITLE, NAMES, NUMBERS = 760, 13, 10, 30, 96, 60
"""Sizes in pixels: of the picture, a bar, between pairs of them, of a model's name, and the room for words beside."""

STYLE = """<style>
svg { --ink: #1c2330; --soft: #5a6475; --theirs: #b6bdc9; --ours: #0f7b53; font: 12px system-ui, sans-serif }
@media (prefers-color-scheme: dark) {
  svg { --ink: #e6eaf1; --soft: #a3adbd; --theirs: #566072; --ours: #4fd0a0 } }
.name { fill: var(--ink); font-size: 14px; font-weight: 600 } .word { fill: var(--soft) }
.theirs { fill: var(--theirs) } .ours { fill: var(--ours) }
</style>"""


class Pair(NamedTuple):
    """A cache's bytes, and the recipe's at the same quality.

    bound: `<` or `>`, beyond what was measured, or nothing.
    """

    cache: str
    theirs: float
    ours: float
    bound: str


def rows(folder: Path) -> Iterator[list[str]]:
    """Cells of the summary's table of bytes to match, of the recipe and the length that are drawn."""
    parts = (folder / "summary.md").read_text().split("At which bytes a token ")
    wanted = [
        part for part in parts if part.startswith(f"`{RECIPE}` is as good, over a sequence of {CONTEXT:,} tokens")
    ]
    if len(wanted) != 1:
        sys.exit(f"{folder}/summary.md: {len(wanted)} tables of `{RECIPE}` over {CONTEXT:,} tokens, expected 1.")
    for line in wanted[0].split("\n\n")[1].splitlines()[2:]:  # below its head
        yield [cell.strip() for cell in line.strip("|").split(" | ")]


def pairs(folder: Path) -> Iterator[Pair]:
    """The caches of a study that are drawn, in order; not those that it could not measure."""
    found = {cells[0]: cells for cells in rows(folder)}
    for cache, words in CACHES.items():
        if len(cells := found.get(cache, [])) > 2:
            sizes = [(float(cell.lstrip("<> ")), cell[0] if cell[0] in "<>" else "") for cell in cells[3::2]]
            ours = max(size for size, _ in sizes)
            bounds = {bound for size, bound in sizes if size == ours}
            yield Pair(words, float(cells[1]), ours, "" if "" in bounds else max(bounds))


def panel(name: str, drawn: list[Pair], width: float) -> tuple[str, float]:
    """A model's bars, and how high they are; lengths are shares of the longest."""
    longest = max(max(pair.theirs, pair.ours) for pair in drawn)
    parts, top = [f'<text class="name" y="16">{escape(name)}</text>'], float(TITLE)
    for pair in drawn:
        parts.append(f'<text class="word" x="0" y="{top + BAR + 4:g}">{escape(pair.cache)}</text>')
        for kind, size, bound in (("theirs", pair.theirs, ""), ("ours", pair.ours, pair.bound)):
            long = (width - NAMES - NUMBERS) * size / longest
            said = f"{bound and bound + ' '}{size:,.0f}"
            parts.append(
                f'<rect class="{kind}" x="{NAMES}" y="{top:g}" width="{long:.1f}" height="{BAR - 1}" rx="2"/>'
                f'<text class="word" x="{NAMES + long + 5:.1f}" y="{top + BAR - 3:g}">{escape(said)}</text>'
            )
            top += BAR
        top += GAP
    return "".join(parts), top


def picture(studies: Mapping[str, Path]) -> str:
    """The picture as SVG, two models beside each other.

    Args:
        studies: folders by name of the model.
    """
    width, top, parts = WIDTH / 2 - 20, 28.0, list[str]()
    drawn = [(name, list(pairs(folder))) for name, folder in studies.items()]
    for first in range(0, len(drawn), 2):
        heights = []
        for column, (name, own) in enumerate(drawn[first : first + 2]):
            bars, height = panel(name, own, width)
            parts.append(f'<g transform="translate({column * (WIDTH / 2 + 10):g} {top:g})">{bars}</g>')
            heights.append(height)
        top += max(heights) + 8
    legend = (
        '<rect class="theirs" width="14" height="12" rx="2"/><text class="word" x="20" y="10">in use today</text>'
        '<rect class="ours" x="130" width="14" height="12" rx="2"/><text class="word" x="150" y="10">'
        f"{RECIPE} with the same KL, look-ups and copies; bytes of KV cache per token at {CONTEXT:,} tokens</text>"
    )
    names = ", ".join(studies)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {top:g}" role="img" '
        f'aria-label="Bytes of KV cache per token at equal quality, of {escape(names)}">\n{STYLE}\n'
        f"{legend}\n" + "\n".join(parts) + "\n</svg>\n"
    )


def studies() -> dict[str, Path]:
    """The studies that are there, by name of the model."""
    found = {name: ROOT / "artifacts" / "studies" / folder for name, folder in MODELS.items()}
    return {name: folder for name, folder in found.items() if (folder / "summary.md").is_file()}


if __name__ == "__main__":
    OUT.write_text(picture(studies()))
    print(f"{OUT.relative_to(ROOT)}: {', '.join(studies())}")
