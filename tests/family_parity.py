"""Print the parity errors of every family on its tiny model: python tests/family_parity.py

Per domain the worst over groups of one and of all KV heads: the relative error of float32 logits of a rewrite that
keeps all columns, and the KL divergence (nats per token) of a written checkpoint with 45 % of the cache removed against
the same compression in memory. The KL of that compression against the model itself stands beside, to show that the
comparison is not one of equal models; the weights are random, so it says nothing about accuracy.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

import torch
import transformers
from conftest import CONFIGS, NO_ROPE, build_tiny, calibrated, in_memory, relative_error

from rotor.evaluation.scoring import position_kl_div
from rotor.export.export import export
from rotor.models.loading import load_model
from rotor.progress import Progress
from rotor.runtime.families import attention_shape
from rotor.search.search import rank_path

COMPRESSION = 0.45
ROWS = torch.randint(2, 4096, (4, 64), generator=torch.Generator().manual_seed(5))


def kl_div(reference: torch.Tensor, logits: torch.Tensor) -> float:
    return float(position_kl_div(reference.flatten(0, 1), logits.flatten(0, 1)).mean())


@torch.inference_mode()
def parity(model: Path, folder: Path, domain: str, size: int | str) -> tuple[float, float, float]:
    """Error of the full-rank rewrite, KL of the written checkpoint against memory, KL of it against the model."""
    run = calibrated(model, folder / "run", domain, size)
    export(run.folder, folder / "out", compression=COMPRESSION, progress=Progress())
    network, bases = in_memory(run), run.bases()
    path = rank_path(bases, run, run.recipe)
    original = network.model(ROWS).logits
    full, cut = path.full(), path.at_compression(COMPRESSION)
    assert cut is not None
    exact = network.compress(full.select(bases), full.rounded)(ROWS).logits
    memory = network.compress(cut.select(bases), cut.rounded)(ROWS).logits
    written = load_model(folder / "out", torch.device("cpu"), torch.float32)(ROWS).logits
    return relative_error(exact, original), kl_div(memory, written), kl_div(original, written)


def main() -> None:
    transformers.utils.logging.disable_progress_bar()
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, float32 on a CPU\n")
    print(
        "| model | heads / KV heads x head_dim | domain | full rank | written against memory | KL of the compression |"
    )
    print("|---|---|---|---|---|---|")
    with tempfile.TemporaryDirectory() as temporary:
        for name in CONFIGS:
            model = build_tiny(name, Path(temporary) / name)
            shape = attention_shape(transformers.AutoConfig.from_pretrained(model))
            turned = f" ({shape.rotary_dim} rotated)" if 0 < shape.rotary_dim < shape.head_dim else ""
            for domain in ("post",) if name in NO_ROPE else ("post", "pre"):
                worst = [
                    max(values)
                    for values in zip(
                        *(
                            parity(model, Path(temporary) / f"{name}-{domain}-{size}", domain, size)
                            for size in dict.fromkeys((1, shape.num_kv_heads))
                        ),
                        strict=True,
                    )
                ]
                kind = "none" if name in NO_ROPE else domain
                sizes = f"{shape.num_heads} / {shape.num_kv_heads} x {shape.head_dim}{turned}"
                print(f"| {name} | {sizes} | {kind} | {worst[0]:.1e} | {worst[1]:.1e} | {worst[2]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
