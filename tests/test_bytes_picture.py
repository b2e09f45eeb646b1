"""The README's picture is what its command makes of the stored studies, and its bars are their numbers."""

from __future__ import annotations

import re
from pathlib import Path
from xml.etree import ElementTree

from bytes_picture import MODELS, OUT, Pair, pairs, picture, studies
from support.paths import ROOT

SVG = "{http://www.w3.org/2000/svg}"

STUDY = """# Study of a model

At which bytes a token `rotor` is as good, over a sequence of 2,048 tokens: by KL, and by the answers of each task.

| cache | bytes | KL | at | look-ups | at | copies | at |
| --- | --- | --- | --- | --- | --- | --- | --- |
| KIVI-4 | 700 | 0.01 | < 300 | 0.95 | < 300 | 0.90 | 405 |

At which bytes a token `rotor` is as good, over a sequence of 32,768 tokens: by KL, and by the answers of each task.

| cache | bytes | KL | at | look-ups | at | copies | at |
| --- | --- | --- | --- | --- | --- | --- | --- |
| fp8, one scale | 1000 | 0.004 | 330 | 0.98 | 300 | 1.01 | > 400 |
| KIVI-4 | 600 | 0.01 | 305 | 0.95 | < 200 | 0.90 | 255 |
| KIVI-2 | 300 | 0.9 | < 200 | 0.5 | < 200 | 0.5 | < 200 |
| KVTC-4 | not measured: it has windows. |

What was measured:

| cache | bytes at 2,048 tokens |
"""


def test_the_picture_is_that_of_the_studies() -> None:
    """Made anew by `python artifacts/bytes_picture.py`."""
    assert OUT.read_text() == picture(studies())
    assert "(docs/bytes.svg)" in (ROOT / "README.md").read_text()
    assert len(studies()) >= 2


def test_bars_are_the_bytes_of_what_is_hardest_to_match(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text(STUDY)
    fp8, kivi = pairs(tmp_path)
    assert fp8 == Pair("fp8", 1000, 400, ">")  # its copies are better than all that was measured
    assert kivi == Pair("KIVI, 4 bits", 600, 305, "")


def test_bars_are_as_long_as_their_numbers(tmp_path: Path) -> None:
    (tmp_path / "summary.md").write_text(STUDY)
    drawn = ElementTree.fromstring(picture({"A & B": tmp_path}))
    bars = [bar for bar in drawn.iter(f"{SVG}rect") if bar.get("height") != "12" or bar.get("y")]
    lengths = [float(bar.get("width", 0)) for bar in bars]
    assert [round(1000 * length / max(lengths)) for length in lengths] == [1000, 400, 600, 305]
    words = [text.text or "" for text in drawn.iter(f"{SVG}text")]
    assert {"A & B", "fp8", "1,000", "> 400", "KIVI, 4 bits", "600", "305"} <= set(words)


def test_all_models_have_names_of_folders() -> None:
    assert all(re.fullmatch(r"match-[\w.-]+", folder) for folder in MODELS.values())
