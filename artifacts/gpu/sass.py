"""Count the warp instructions of a compiled kernel in its machine code (SASS), by the graph of its control flow.

A GPU issues at most so many instructions a cycle, whatever they do. What a kernel issues is known without a GPU: loops
are found in the control flow, each loop's own instructions are counted once, and the caller says how often it runs.

- A predicated instruction counts, whether or not its predicate holds.
- Of branches the longer way counts, unless its loop says how often that is taken. Warps are assumed not to diverge.
- A called routine (a division, for one) counts along its longer way, at each call.
- Loops on ways that exclude each other (a compiler clones loops) are the same declared loop.
- A loop that runs once, as the compiler knows, is not in the machine code: it is not to be declared.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import networkx

PADDING = {"BRA", "NOP", "EXIT", "RET", "BSYNC", "WARPSYNC"}
"""Opcodes of what may stand where nothing leads."""


class CountError(Exception):
    """Machine code whose loops are not the declared ones, or whose control flow cannot be followed."""


@dataclass(frozen=True)
class Loop:
    """A loop as its kernel's author knows it.

    trips: how often it runs, each time that what holds it runs. inner: the loops in it, in order.
    longer: share of its trips that take the longer way of branches; the others take the shorter one.
    """

    trips: float
    inner: tuple[Loop, ...] = ()
    longer: float = 1.0


@dataclass(frozen=True)
class Instruction:
    """One of the machine code: `guard` is its predicate or empty, `target` the label that it names.

    stall: cycles until the same warp may issue its next instruction, as the compiler wrote it.
    """

    opcode: str
    guard: str
    operands: str
    target: str | None
    stall: int = 0

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def jumps(self) -> bool:
        """Tell whether it may go on at its target; what is called by a label inside the kernel does not return."""
        called = self.base == "CALL" and self.target is not None and self.target.startswith(".L")
        return self.base in ("BRA", "JMP") or called

    @property
    def returns(self) -> bool:
        """Tell whether the kernel, or a routine, ends here or may do so."""
        return self.base in ("EXIT", "RET", "KILL")

    @property
    def indirect(self) -> bool:
        return self.base in ("BRX", "BRXU", "JMX")

    @property
    def conditional(self) -> bool:
        """Tell whether the next instruction may follow: a predicate before it, or among a branch's operands."""
        others = self.operands.replace(f"`({self.target})", "").strip(" ,") if self.opcode.startswith("BRA") else ""
        return bool(self.guard) or bool(others)


def disassemble(cubin: bytes) -> str:
    """The machine code of a kernel, with labels and encodings."""
    return _tool("nvdisasm", cubin, "-c", "-hex")


def usage(cubin: bytes) -> tuple[int, int]:
    """Registers, and bytes of the stack (what is spilled), of a thread."""
    found = re.search(r"REG:(\d+) STACK:(\d+)", _tool("cuobjdump", cubin, "-res-usage"))
    assert found is not None
    return int(found[1]), int(found[2])


def _tool(name: str, cubin: bytes, *options: str) -> str:
    """Run one of the tools that come with Triton."""
    import triton

    tool = Path(triton.__path__[0]) / "backends" / "nvidia" / "bin" / name
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([tool, *options, file.name], capture_output=True, text=True, check=True).stdout


def parse(sass: str) -> tuple[list[Instruction], dict[str, int]]:
    """The instructions of the first function, and of each label the instruction behind it."""
    found: list[Instruction] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := re.match(r"\s*(\.L_\w+|\$\w+\S*|[A-Za-z_]\w*):\s*$", line):
            labels.setdefault(label[1], len(found))
        elif text := re.match(r"\s*/\*[0-9a-f]{4,}\*/\s+(?:(@!?\w+)\s+)?([\w.]+)\s*(.*?)\s*;", line):
            target = re.search(r"`\(([^)]+)\)", text[3])
            found.append(Instruction(text[2], text[1] or "", text[3], target[1] if target else None))
        elif found and (upper := re.match(r"\s*/\* 0x([0-9a-f]{16}) \*/\s*$", line)):
            found[-1] = replace(found[-1], stall=int(upper[1], 16) >> 41 & 15)
    return found, labels


def _one(_: Instruction) -> float:
    return 1.0


class Graph:
    """The control flow of a kernel. A block is named by the index of its first instruction."""

    def __init__(self, sass: str) -> None:
        code, self.labels = parse(sass)
        starts = {0, *self.labels.values()}
        starts |= {i + 1 for i, each in enumerate(code) if each.jumps or each.returns or each.indirect}
        ordered = [*sorted(start for start in starts if start < len(code)), len(code)]
        self.blocks = {start: code[start:end] for start, end in pairwise(ordered)}
        self.flow = networkx.DiGraph()
        for start, end in pairwise(ordered):
            self.flow.add_node(start)
            last = code[end - 1]
            if last.indirect or (last.jumps and last.target not in self.labels):
                raise CountError(f"a branch whose target is not known: {last.opcode} {last.operands}")
            if last.jumps and last.target is not None:
                self.flow.add_edge(start, self.labels[last.target])
            if end < len(code) and (last.conditional or not (last.jumps or last.returns)):
                self.flow.add_edge(start, end)
        self._routines: dict[str, float] = {}
        self._weight: Callable[[Instruction], float] = _one

    def count(self, loops: Sequence[Loop] = (), weight: Callable[[Instruction], float] = _one) -> float:
        """Instructions of one warp from its start to its end, or what else they weigh.

        Raises:
            CountError: other loops than the declared ones.
        """
        self._routines, self._weight = {}, weight
        reached = self._reached(0)
        total = self._longest(reached, 0, tuple(loops))
        for routine in self._routines:
            reached |= self._reached(self.labels[routine])
        for block in self.blocks.keys() - reached:
            if any(each.base not in PADDING for each in self.blocks[block]):
                raise CountError(f"nothing leads to the instructions from {block} on")
        return total

    def _reached(self, start: int) -> set[int]:
        return {start} | networkx.descendants(self.flow, start)

    def _instructions(self, block: int) -> float:
        """Sum the weights of a block's instructions, with the routines that it calls."""
        called = (x.target for x in self.blocks[block] if x.base == "CALL" and x.target is not None and not x.jumps)
        return sum(map(self._weight, self.blocks[block])) + sum(map(self._routine, called))

    def _routine(self, label: str) -> float:
        """Count the instructions of a called routine; a loop in it runs once."""
        if label not in self.labels:
            raise CountError(f"a call of {label}, which is not in the machine code")
        if label not in self._routines:
            self._routines[label] = 0  # of a routine that calls itself
            start = self.labels[label]
            self._routines[label] = self._longest(self._reached(start), start, None)
        return self._routines[label]

    def _longest(
        self,
        blocks: set[int],
        header: int,
        declared: tuple[Loop, ...] | None,
        loop: bool = False,
        choose: Callable[[list[float]], float] = max,
    ) -> float:
        """The longest way through a loop's blocks, a routine's or the kernel's, entered at `header`, once.

        Args:
            declared: the loops inside; None: any, once each. choose: the way that is taken, `min` for the shortest.
        """
        inside = self.flow.subgraph(blocks).copy()
        ending = {block for block in blocks if self.blocks[block][-1].returns}
        if loop:
            ending = set(inside.predecessors(header))
            inside.remove_edges_from([(block, header) for block in ending])
        ways = networkx.condensation(inside)  # each loop inside is one node
        order = list(networkx.topological_sort(ways))
        members = {node: ways.nodes[node]["members"] for node in order}
        loops = {node for node in order if len(members[node]) > 1 or inside.has_edge(*[min(members[node])] * 2)}
        before = dict.fromkeys(order, 0)  # loops in a row before each
        for node in order:
            for after in ways.successors(node):
                before[after] = max(before[after], before[node] + (node in loops))
        rows = sorted({before[node] for node in loops})
        if declared is not None and len(rows) != len(declared):
            raise CountError(f"{len(rows)} loops in a row, declared are {len(declared)}")
        ends = {ways.graph["mapping"][block] for block in ending}
        best: dict[int, float] = {}
        for node in reversed(order):
            further = [best[after] for after in ways.successors(node) if after in best] + [0.0] * (node in ends)
            if not further:
                continue
            if node in loops:
                each = Loop(1) if declared is None else declared[rows.index(before[node])]
                inner = None if declared is None else each.inner
                entry = self._entry(inside, members[node], header)
                way = self._longest(members[node], entry, inner, loop=True)
                if each.longer < 1:
                    shorter = self._longest(members[node], entry, inner, loop=True, choose=min)
                    way = each.longer * way + (1 - each.longer) * shorter
                own = each.trips * way
            else:
                own = self._instructions(min(members[node]))
            best[node] = choose(further) + own
        return best[ways.graph["mapping"][header]]

    @staticmethod
    def _entry(inside: networkx.DiGraph, members: set[int], header: int) -> int:
        """The block by which a loop is entered."""
        found = {b for b in members if b == header or not members.issuperset(inside.predecessors(b))}
        if len(found) != 1:
            raise CountError("a cycle in the control flow that is no loop: it is entered in two places")
        return found.pop()
