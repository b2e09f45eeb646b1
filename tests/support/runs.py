"""Settings with which commands take seconds, and small runs made with them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import torch

from rotor import Run, calibrate
from rotor.checkpoint.layout import LayerRanks
from rotor.checkpoint.manifest import Manifest, write_manifest
from rotor.models.compressible import CompressibleModel
from rotor.models.hardware import DevicePlan
from rotor.models.source import Checkpoint
from support.paths import ROOT

FAST_EVALUATION = [
    "evaluation.seq_len=128",
    "evaluation.search_tokens=512",
    "evaluation.report_tokens=512",
    "evaluation.lookup_prompts=4",
    "evaluation.copy_prompts=4",
    "search.resolution=0.1",
    "search.tries=0",
]
"""Overrides for tests that need a measured table but not a precise one."""

SHORT_TEXT = [
    "evaluation.source=text",
    f"evaluation.path={ROOT / 'LICENSE'}",
    "evaluation.search_tokens=256",
    "evaluation.report_tokens=256",
    "evaluation.lookup_prompts=2",
    "evaluation.copy_prompts=2",
]
"""Overrides for tests that need some measurement: a text that is tokenised in no time, and few prompts."""

WITH_EXACT = [
    "tokens.source=random",
    "tokens.count=512",
    "tokens.seq_len=64",
    "codes.tokens=256",
    "groups.size=2",
    "exact.first=2",
    "exact.newest=8",
]
"""Overrides for calibrating any tiny model; exact tokens are fewer than a prompt, so that generation reads codes."""

TABLE_OPTIONS = [item for setting in [*FAST_EVALUATION, *SHORT_TEXT] for item in ("--set", setting)]
SMALL_OPTIONS = [
    "--set",
    "tokens.source=random",
    "--set",
    "tokens.count=1024",
    "--set",
    "tokens.seq_len=64",
    *TABLE_OPTIONS,
]

TINY_STUDY = [
    *FAST_EVALUATION,
    *SHORT_TEXT,
    "tokens.source=random",
    "tokens.count=512",
    "tokens.seq_len=64",
    "evaluation.seq_len=64",
    "evaluation.report_tokens=128",
    "evaluation.search_tokens=64",
    "evaluation.metric=text",
    "ranks.multiple_of=1",
]
"""Overrides for the parts of a study on a tiny model."""

SMALL_STUDY = [
    "exact.first=0",
    "exact.newest=0",
    "tokens.count=1024",
    "tokens.seq_len=64",
    "evaluation.lookup_prompts=4",
    "evaluation.copy_prompts=4",
    "evaluation.seq_len=64",
    "evaluation.search_tokens=256",
    "evaluation.report_tokens=512",
    "search.resolution=0.2",
    "search.tries=0",
]


def calibrated(model: Path, out: Path, domain: str, size: int | str, **bases: str) -> Run:
    """A run of a tiny model in a domain and group size; closed-form bases unless said otherwise."""
    overrides = [
        f"groups.domain={domain}",
        f"groups.size={size}",
        f"bases.qk={bases.get('qk', 'kq')}",
        f"bases.vo={bases.get('vo', 'kq')}",
        "tokens.count=1024",
        "tokens.seq_len=64",
        "ranks.multiple_of=4",
        *FAST_EVALUATION,
        *SHORT_TEXT,
    ]
    return calibrate(model, out, "fdc", overrides)


def reseal(folder: Path) -> str:
    """Give an edited run or checkpoint a manifest that fits, as somebody might who means harm; its new digest."""
    return write_manifest(folder, Manifest.read(folder).kind)


def in_memory(run: Run, rewrite_dtype: torch.dtype | None = None) -> CompressibleModel:
    """The run's model in float32 on the CPU, ready to be compressed."""
    return CompressibleModel(
        Checkpoint(run.model_folder), DevicePlan(torch.device("cpu"), torch.float32), rewrite_dtype
    )


def whole_ranks(run: Run) -> list[LayerRanks]:
    """Ranks of every layer that remove nothing."""
    return [[(columns, 0 if run.form.joint else columns)] * groups for groups, columns in run.columns]


def contents(folder: Path) -> dict[str, str]:
    return {
        str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest()
        for p in sorted(folder.rglob("*"))
        if p.is_file()
    }
