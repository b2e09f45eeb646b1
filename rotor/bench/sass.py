"""Count the warp instructions of a compiled kernel in its machine code (SASS), by the graph of its control flow.

A GPU issues at most so many instructions a cycle, whatever they do, and decoding compressed rows meets that limit
before any other. What a kernel issues is known without a GPU: natural loops are found in the control flow (a back edge
goes to a block that dominates it), each loop's own instructions are counted once, and the caller says how often it goes
round.

- A predicated instruction is counted: it takes its place whether or not its predicate holds.
- Of branches inside a loop the longer way is counted, or the shorter where a Loop says so (ways that are rarely taken).
  Warps are taken to be uniform: one that diverges would go both ways.
- A called routine (division, for one) is counted, along its longer way, at each call.
- Loops that lie on ways that exclude each other (a compiler clones loops) are the same declared loop.
- A loop whose rounds the compiler knows to be one is not in the machine code: it is not to be declared.
- Compilers unroll. Several rounds in one are seen by what a Loop `holds`; and where a loop has a multiple of what the
  next one (or the one before it) loads, exchanges and multiplies, that is taken for what is left of its rounds.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

PIPES = (
    ("tensor", r"(H|I|D|B|Q|O)G?MMA|UTC.*MMA"),
    ("local", r"LDL|STL"),
    ("shared", r"LDSM?|STSM?|ATOMS.*|MATCH|REDUX"),
    ("exchange", r"SHFL"),
    ("global", r"LDG|LDGSTS|STG|LD|ST|ATOMG?|REDG?|UBLK.*|UTMA.*|UTMC.*|CCTL.*"),
    ("constant", r"U?LDCU?"),
    ("control", r"BRA|BRX.*|JMP|JMX.*|CALL|RET|EXIT|KILL|BSSY|BSYNC|BREAK|WARPSYNC|YIELD|NOP|BAR|BMOV|DEPBAR|.*DEPBAR"
                r"|ERRBAR|MEMBAR|FENCE|NANOSLEEP|BPT|SYNCS|WARPGROUP.*|ACQBULK|ENDCOLLECTIVE|ELECT|S2R|CS2R"),
    ("uniform", r"U[A-Z].*|R2UR|S2UR|VOTEU"),
    ("mufu", r"MUFU|I2F|F2I|F2F|FRND|POPC|FLO|BREV"),
    ("double", r"D(FMA|ADD|MUL|SETP)"),
    ("fma", r"F(FMA|MUL|ADD).*|H(FMA|MUL|ADD)2.*|IMAD.*|IDP.*"),
    ("alu", r".*"),
)  # fmt: skip
"""Execution pipes, and the opcodes of each; the first that fits."""


class CountError(Exception):
    """Machine code whose loops are not the declared ones, or whose control flow cannot be followed."""


@dataclass(frozen=True)
class Loop:
    """A loop as its kernel's author knows it.

    trips: times that it goes round, each time that what holds it runs. inner: the loops in it, in order.
    shorter: of ways inside it the shorter one is usual, as where a branch handles a rare tail.
    holds: a pipe, and instructions of it that one round has outside of the loops further in; by these it is seen how
        many rounds the compiler made one.
    """

    trips: float
    inner: tuple[Loop, ...] = ()
    shorter: bool = False
    holds: tuple[str, int] | None = None


@dataclass(frozen=True)
class Instruction:
    """One of the machine code: `guard` is its predicate or empty, `target` the label that it names."""

    opcode: str
    guard: str
    operands: str
    target: str | None

    @property
    def pipe(self) -> str:
        return next(name for name, pattern in PIPES if re.fullmatch(pattern, self.base))

    @property
    def ends(self) -> bool:
        """Whether control leaves or may leave the line behind it."""
        return self.base in ("EXIT", "RET", "KILL", "BRX", "BRXU", "JMX") or self.jumps

    @property
    def base(self) -> str:
        return self.opcode.partition(".")[0]

    @property
    def jumps(self) -> bool:
        """Whether to its target. What is called by a label inside of the kernel does not return."""
        called = self.base == "CALL" and self.target is not None and self.target.startswith(".L")
        return self.base in ("BRA", "JMP") or called

    @property
    def conditional(self) -> bool:
        """Whether the next instruction may follow: a predicate before it, or among a branch's operands."""
        others = self.operands.replace(f"`({self.target})", "").strip(" ,") if self.opcode.startswith("BRA") else ""
        return bool(self.guard) or bool(others)


Weights = Counter[str]


@dataclass
class Region:
    """Blocks that one loop holds, or a routine, or the kernel; `header` is entered first. inner: loops in it."""

    header: int
    blocks: frozenset[int]
    loop: bool = True
    inner: list[Region] = field(default_factory=list)


Row = tuple[list[Region], float]
"""A loop, with clones on other ways, and how many of its rounds the compiler made one."""


@dataclass(frozen=True)
class Counted:
    """Warp instructions of one warp from its begin to its end, by pipe.

    loops: one loop's own, each time round, and its times round in all, outermost and first in order first.
    """

    pipes: Mapping[str, float]
    loops: tuple[tuple[float, float], ...]

    @property
    def instructions(self) -> float:
        return sum(self.pipes.values())


def disassemble(cubin: bytes) -> str:
    """The machine code of a kernel, with labels."""
    return _tool("nvdisasm", cubin, "-c")


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
    return found, labels


class Graph:
    """The control flow of a kernel: blocks with their instructions by pipe, what follows each, and its loops."""

    def __init__(self, sass: str) -> None:
        self.code, self.labels = parse(sass)
        self.starts = sorted({0, *self.labels.values()} | {i + 1 for i, x in enumerate(self.code) if x.ends})
        self.starts = [start for start in self.starts if start < len(self.code)]
        self.block_at = {start: block for block, start in enumerate(self.starts)}
        ends = [*self.starts[1:], len(self.code)]
        self.spans = list(zip(self.starts, ends, strict=True))
        self.next = [self._successors(block) for block in range(len(self.spans))]
        self._routines: dict[str, Weights] = {}

    def _successors(self, block: int) -> tuple[int, ...]:
        last, end = self.code[self.spans[block][1] - 1], self.spans[block][1]
        following = (self.block_at[end],) if end < len(self.code) else ()
        if not last.ends:
            return following
        if last.base in ("JMX", "BRX", "BRXU") or (last.jumps and last.target not in self.labels):
            raise CountError(f"a branch whose target is not known: {last.opcode} {last.operands}")
        taken = (self._block(last.target),) if last.jumps else ()
        return tuple(dict.fromkeys(taken + (following if last.conditional else ())))

    def leaves(self, block: int) -> bool:
        """Whether the kernel, or a routine, ends here or may do so."""
        return self.code[self.spans[block][1] - 1].base in ("EXIT", "RET", "KILL")

    def _block(self, label: str | None) -> int:
        assert label is not None
        return self.block_at[self.labels[label]]

    def weights(self, block: int) -> Weights:
        """Instructions of a block by pipe, those of routines that it calls among them."""
        total: Weights = Counter()
        for instruction in self.code[slice(*self.spans[block])]:
            total[instruction.pipe] += 1
            if instruction.base == "CALL" and instruction.target is not None and not instruction.jumps:
                total += self._routine(instruction.target)
        return total

    def _routine(self, label: str) -> Weights:
        """Of a called routine, along its longer way; a loop in it goes round once."""
        if label not in self.labels:
            raise CountError(f"a call of {label}, which is not in the machine code")
        if label not in self._routines:
            self._routines[label] = Counter()  # of a routine that calls itself
            plan = Plan(self, self._loops(self._block(label)))
            blocks = {node: self.weights(node) for node in plan.after}
            self._routines[label] = plan.way(blocks)
        return self._routines[label]

    def _reached(self, start: int) -> frozenset[int]:
        seen, left = {start}, [start]
        while left:
            new = set(self.next[left.pop()]) - seen
            seen |= new
            left += new
        return frozenset(seen)

    def _dominators(self, entry: int, blocks: frozenset[int]) -> dict[int, set[int]]:
        """Of each block those that every way from the entry to it goes through."""
        before = {block: [b for b in blocks if block in self.next[b]] for block in blocks}
        found = {block: set(blocks) for block in blocks} | {entry: {entry}}
        changed = True
        while changed:
            changed = False
            for block in sorted(blocks - {entry}):
                new = {block} | set.intersection(*(found[b] for b in before[block]))
                changed |= new != found[block]
                found[block] = new
        return found

    def _loops(self, entry: int) -> Region:
        """What is reached from a block, as a tree of natural loops; those of one header are one."""
        root = Region(entry, self._reached(entry), loop=False)
        dominators = self._dominators(entry, root.blocks)
        bodies: dict[int, set[int]] = {}
        for block in root.blocks:
            for header in dominators[block] & set(self.next[block]):
                bodies.setdefault(header, {header}).update(self._body(header, block, root.blocks))
        regions = [Region(header, frozenset(body)) for header, body in bodies.items()]
        for region in regions:
            around = [r for r in regions if r is not region and r.blocks > region.blocks]
            min(around, key=lambda r: len(r.blocks), default=root).inner.append(region)
        return root

    def _body(self, header: int, latch: int, blocks: frozenset[int]) -> set[int]:
        """The blocks from which the latch is reached without the header."""
        body, left = {header, latch}, {latch} - {header}
        while left:
            block = left.pop()
            new = {b for b in blocks if block in self.next[b]} - body
            body |= new
            left |= new
        return body

    def count(self, loops: Sequence[Loop] = ()) -> Counted:
        """Count from begin to end of one warp.

        Raises:
            CountError: other loops than the declared ones.
        """
        listed: list[tuple[float, float]] = []
        total = self._count(self._loops(0), Loop(1, tuple(loops)), 1, listed)
        reached = self._reached(0).union(*(self._reached(self._block(label)) for label in self._routines))
        for block in set(range(len(self.spans))) - reached:
            if self.weights(block).total() > self.weights(block)["control"]:
                raise CountError(f"nothing leads to the instructions from {self.spans[block][0]} on")
        return Counted(dict(total), tuple(listed[1:]))

    def _count(self, region: Region, declared: Loop, times: float, listed: list[tuple[float, float]]) -> Weights:
        """Of a region, once; `listed` gets its own instructions and those of the loops in it."""
        plan, expected = Plan(self, region), declared.inner
        weights = {node: Counter[str]() if node in plan.loops else self.weights(node) for node in plan.after}
        own = plan.way(weights, declared.shorter)
        rounds = 1.0
        if declared.holds is not None and not region.inner:
            rounds = max(1.0, own[declared.holds[0]] / declared.holds[1])
        listed.append((sum(own.values()) / rounds, times))
        rows = plan.rows()
        if len(rows) > len(expected):
            rows = self._without_rests(rows)
        if len(rows) != len(expected):
            raise CountError(f"{len(rows)} loops in a row, declared are {len(expected)} (depth {len(listed)})")
        for (row, merged), loop in zip(rows, expected, strict=True):
            for clone in row:
                each = self._count(clone, loop, times * loop.trips / merged, listed)
                weights[clone.header] = Counter({pipe: loop.trips / merged * n for pipe, n in each.items()})
        return Counter({pipe: n / rounds for pipe, n in plan.way(weights, declared.shorter).items()})

    def _without_rests(self, rows: list[Row]) -> list[Row]:
        """Join each loop of several rounds in one with the loop beside it that does the rest of them."""
        found = rows[:1]
        for row, _ in rows[1:]:
            ratio = self._ratio(found[-1][0][0], row[0])
            if ratio >= 2:
                found[-1] = found[-1][0], ratio
            elif 0 < ratio <= 1 / 2:
                found[-1] = row, 1 / ratio
            else:
                found.append((row, 1.0))
        return found

    def _ratio(self, one: Region, other: Region) -> float:
        """How many times as much one innermost loop loads, exchanges and multiplies as another; 0: not alike."""
        ratios = set()
        for pipe in ("tensor", "global", "shared", "exchange", "mufu"):
            a, b = (sum(self.weights(block)[pipe] for block in loop.blocks) for loop in (one, other))
            if a or b:
                ratios.add(a / b if a and b else 0.0)
        alike = len(ratios) == 1 and not one.inner and not other.inner
        return ratios.pop() if alike else 0.0


class Plan:
    """A region without its way back: its blocks, loops further in as one node each (their header), in order."""

    def __init__(self, graph: Graph, region: Region) -> None:
        inside = {block: loop.header for loop in region.inner for block in loop.blocks}
        self.header, self.loops = region.header, {loop.header: loop for loop in region.inner}
        self.after: dict[int, set[int]] = {}
        self.ending: set[int] = set()
        for block in region.blocks:
            node, following = inside.get(block, block), set(graph.next[block]) & region.blocks
            self.after.setdefault(node, set()).update({inside.get(b, b) for b in following} - {node, self.header})
            if self.header in following if region.loop else graph.leaves(block):
                self.ending.add(node)
        self.order: list[int] = []
        seen, stack = set(), [(self.header, False)]
        while stack:
            node, done = stack.pop()
            if done:
                self.order.insert(0, node)
            elif node not in seen:
                seen.add(node)
                stack += [(node, True), *((b, False) for b in self.after[node])]
        rank = {node: place for place, node in enumerate(self.order)}
        if any(rank[b] <= rank[node] for node in self.order for b in self.after[node]):
            raise CountError("a cycle in the control flow that is no loop: it is entered in two places")

    def way(self, weights: Mapping[int, Weights], shorter: bool = False) -> Weights:
        """The longer (or shorter) way from the header round to it, or out of the kernel."""
        best: dict[int, Weights] = {}
        for node in reversed(self.order):
            ways = [best[b] for b in self.after[node] if b in best] + [Counter[str]()] * (node in self.ending)
            if ways:
                best[node] = (min if shorter else max)(ways, key=lambda way: sum(way.values())) + weights[node]
        return best[self.header]

    def rows(self) -> list[Row]:
        """The loops further in, one behind the other on the way that has most of them; beside each its clones."""
        before = dict.fromkeys(self.order, 0)
        for node in self.order:
            for b in self.after[node]:
                before[b] = max(before[b], before[node] + (node in self.loops))
        places = sorted({before[header] for header in self.loops})
        return [([loop for h, loop in sorted(self.loops.items()) if before[h] == place], 1.0) for place in places]
