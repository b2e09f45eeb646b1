"""The command line of `python artifacts/gpu`."""

from __future__ import annotations

import argparse
import json
import logging
import shlex
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rotor.checkpoint.output_folder import check_file
from rotor.errors import UsageError
from rotor.tools.bench.precompile import parse_archs, subjects_of
from rotor.tools.bench.records import provenance

from . import bundle
from .plan import CARRIED, jobs, needs_program
from .session import MINUTES, run
from .subjects import STEP, named_subjects
from .summary import table

if TYPE_CHECKING:
    from .count import CountedLayer

COUNT, CUDA, CUT, JOIN = "count", "cuda", "cut", "join"

TITLES = (
    "layer", "arch", "limit", "layers", "bytes a key and head", "moved in SMs", "spilled B", "instructions",
    "over uncompressed", "at least",
)  # fmt: skip


def run_command(given: Sequence[str]) -> int:
    """Do what a command line asks for; returns the exit code.

    Raises:
        UsageError: no GPU; a job, layout, architecture or file that is not there.
    """
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    if given[:1] == [COUNT]:
        return count(_count_parser().parse_args(given[1:]), given)
    if given[:1] == [CUDA]:
        return count_cuda(given[1:])
    if given[:1] == [CUT]:
        return cut_file(given[1:])
    if given[:1] == [JOIN]:
        return join_parts(given[1:])
    return measure(_parser().parse_args(given), given)


def _parser() -> argparse.ArgumentParser:
    names = [job.name for job in jobs(Path())]
    parser = argparse.ArgumentParser(
        prog="python artifacts/gpu",
        description="Test and measure the kernels on this GPU within some minutes. Numbers come before long tests, "
        "each job in processes of its own; each result is appended to the file as it comes, and a summary is "
        "written beside it. Jobs whose programs (ncu, compute-sanitizer) are not installed are skipped. Without a GPU "
        "it prints what would run. Exit code 1 if a part failed, 2 without a GPU.",
        epilog=f"`python artifacts/gpu {COUNT} --help`: instructions of the kernels, counted without a GPU. {CUDA}: "
        f"those of the study in CUDA C++, compiled by nvcc. {CUT} and {JOIN}: a real model for a machine without "
        "network, see `make gpu-bundle MODEL=FILE`.",
    )
    parser.add_argument("-o", "--out", type=Path, default=Path("gpu.jsonl"), help="JSON lines, one for each result")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="for all of it (default %(default)g)")
    parser.add_argument("--only", default="", metavar="A,B", help=f"jobs: {', '.join(names)}")
    parser.add_argument("--layouts", default="", metavar="A,B", help="named layouts to compile, time and tune")
    return parser


def measure(asked: argparse.Namespace, given: Sequence[str]) -> int:
    check_file(asked.out)
    if not 0.5 <= asked.minutes <= 600:
        raise UsageError(f"--minutes {asked.minutes:g}: expected 0.5 to 600.")
    say = logging.getLogger("gpu").info
    session = run(asked.out, asked.minutes, _command(given), say, _names(asked.only), _names(asked.layouts))
    print(session.summary)
    if not session.cuda:
        raise UsageError("there is no CUDA device here.", "Run it on the GPU that is to serve.")
    return int(session.failed)


def count_cuda(given: Sequence[str]) -> int:
    from .cuda_decode import count_rows

    parser = argparse.ArgumentParser(
        prog=f"python artifacts/gpu {CUDA}",
        description="Count the warp instructions a key and KV head of the decode kernel in CUDA C++, a study; nvcc "
        "compiles it. Beside it, those of the kernel that serves.",
    )
    parser.add_argument("--arch", default="sm_90", help="architectures, as in sm_80,sm_90")
    asked = parser.parse_args(given)
    if missing := needs_program("nvcc"):
        raise UsageError(f"{missing}.", "Install CUDA's compiler.")
    titles = "layout", "arch", "registers", "spilled B", "instructions", "of decode in Triton"
    rows = count_rows(parse_archs(asked.arch))
    print(table(titles, ((*about, f"{own:.2f}", f"{triton:.2f}") for *about, own, triton in rows)))
    return 0


def cut_file(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python artifacts/gpu {CUT}",
        description=f"Cut a file of packed weights ({', '.join(bundle.KINDS)}) into parts of at most "
        f"{bundle.PART_BYTES >> 20} MiB, to be carried one by one.",
    )
    parser.add_argument("file", type=Path, metavar="FILE")
    parser.add_argument("-o", "--out", type=Path, default=CARRIED, help="a new folder (default %(default)s)")
    asked = parser.parse_args(given)
    for path in bundle.cut(asked.file, asked.out):
        print(f"{path.stat().st_size:12,} {path}")
    return 0


def join_parts(given: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(
        prog=f"python artifacts/gpu {JOIN}", description="Join and check the parts of a file that were carried here."
    )
    parser.add_argument("folder", type=Path, nargs="?", default=CARRIED, help="(default %(default)s)")
    print(bundle.join(parser.parse_args(given).folder))
    return 0


def _count_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python artifacts/gpu {COUNT}",
        description="Count the warp instructions of a decode step's kernels in their machine code, per key and KV "
        "head, and predict the time of a layer's attention from them as a share of the uncompressed layer's. For "
        "sm_80 and sm_90 also the busiest pipe of an SM, the share if each kernel ran as fast as that pipe allows, and "
        "the bytes through shared memory and L1. Exit code 1 if a kernel cannot be compiled or counted.",
    )
    parser.add_argument("folder", type=Path, nargs="?", metavar="OUT", help="a checkpoint that `rotor export` wrote")
    parser.add_argument("--named", action="store_true", help="layouts that have names, without a checkpoint")
    parser.add_argument("--arch", default="sm_90", help="architectures, as in sm_80,sm_90")
    parser.add_argument("--json", action="store_true", help="print JSON, with registers and shared memory")
    return parser


def count(asked: argparse.Namespace, given: Sequence[str]) -> int:
    from .count import DEVICE_OF_ARCH, count_layers

    if (asked.folder is not None) == asked.named:
        raise UsageError("expected either OUT or --named.", f"Example: python artifacts/gpu {COUNT} --named")
    archs = parse_archs(asked.arch)
    layers = count_layers(named_subjects().values() if asked.named else subjects_of(asked.folder), archs)
    kernels = [(layer.layout, kernel) for layer in layers for kernel in layer.kernels]
    failed = [(layout, kernel) for layout, kernel in kernels if kernel.error is not None]
    rates = {f"sm_{number}": DEVICE_OF_ARCH.get(number) for number in archs}
    if asked.json:
        about: dict[str, Any] = {**provenance(_command(given)), "predicted_for": rates}
        about |= {"batch_size": STEP.batch_size, "length": STEP.context_tokens, "failed": len(failed)}
        print(json.dumps({**about, "layers": [*map(asdict, layers)]}, indent=2))
    else:
        print(f"A decode step's attention, {STEP.batch_size} x {STEP.context_tokens} tokens, predicted for {rates}\n")
        print(table(TITLES, map(_row, layers)))
        for layout, kernel in failed:
            print(f"{layout}, {kernel.name}, {kernel.arch}: {str(kernel.error)[:400]}")
        print(f"{len(kernels)} kernels, {len(failed)} failed")
    return int(bool(failed))


def _row(layer: CountedLayer) -> tuple[object, ...]:
    """Cells of TITLES; a dash for what could not be counted."""
    moved = "-" if layer.path_bytes_per_key is None else f"{layer.path_bytes_per_key:.0f}"
    counts = (layer.instructions_per_key, layer.share, layer.share_of_limit)
    return (
        layer.layout, layer.arch, layer.limit or "-", layer.layers, f"{layer.bytes_per_key:g}", moved,
        layer.spilled_bytes, *("-" if each is None else f"{each:.2f}" for each in counts),
    )  # fmt: skip


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",") if name.strip()]


def _command(given: Sequence[str]) -> str:
    return shlex.join(["python", "artifacts/gpu", *given])
