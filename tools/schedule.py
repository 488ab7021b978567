"""Print what the compiler scheduled for the chains of multiply-adds of a kernel; needs no GPU.

    python -m tools.schedule CUBIN [KERNEL]

An instruction of sm_70 and later holds the cycles that its warp waits before the next one. In a
loop of products, their sum is the least time of a turn. A chain of multiply-adds, each of which
adds to the result of the one before, takes 4 cycles each at best. Loops in which a warp only waits
for a barrier in shared memory, until a copy is complete, are left out, with the instructions that
are skipped together with them: usually the copy is complete.

nvdisasm is in the package nvidia-cuda-nvdisasm. `nvcc -cubin -arch=sm_90` makes a cubin.
"""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

# Of a line of `nvdisasm -hex`, and of the next one, with the other half of the instruction.
_LABEL = re.compile(r"(\.L\w+):")
_INSTRUCTION = re.compile(r"\s*/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x[0-9a-f]{16} \*/")
_UPPER_HALF = re.compile(r"\s*/\* 0x([0-9a-f]{16}) \*/")
_BRANCH = re.compile(r"\bBRA\S* .*`\((\.L\w+)\)")
_WAIT = "SYNCS.PHASECHK"  # whether a phase of a barrier has ended
_STALL_BITS = 41  # where the cycles are in the upper half: 4 bits
_DENSE = 0.2  # share of multiply-adds in a loop of products, at least


@dataclass(frozen=True)
class Instruction:
    """An instruction, and the cycles before the next one."""

    text: str
    stall: int

    @property
    def registers(self) -> list[str]:
        """Return the result and the operands of a multiply-add; of others, nothing."""
        name, _, operands = self.text.partition(" ")
        if name != "FFMA":
            return []
        return [operand.strip().split(".")[0] for operand in operands.split(",")]


@dataclass(frozen=True)
class Loop:
    """A loop: its multiply-adds, the longest chain of them, and the cycles of a turn."""

    products: int
    chained: int
    cycles: int

    def __str__(self) -> str:
        per_product = self.cycles / self.chained
        return (
            f"{self.products} multiply-adds in chains of {self.chained}: {self.cycles} cycles, "
            f"{per_product:.2f} for each of a chain"
        )


def disassembler() -> str | None:
    """Return the path of nvdisasm; None if it is not installed."""
    if found := shutil.which("nvdisasm"):
        return found
    spec = find_spec("nvidia")
    folders = [Path(folder) for folder in spec.submodule_search_locations or []] if spec else []
    paths = [path for folder in folders for path in folder.glob("*/bin/nvdisasm*")]
    return str(paths[0]) if paths else None


def loops(lines: list[str], kernel: str) -> Iterator[Loop]:
    """Yield the loops of products in a disassembled kernel that contain no other such loop."""
    code, labels = _parse(lines, kernel)
    ranges: list[tuple[int, int]] = []  # of instructions
    for end, instruction in enumerate(code):
        target = _BRANCH.search(instruction.text)
        start = labels.get(target[1], end + 1) if target else end + 1
        products = sum(bool(part.registers) for part in code[start : end + 1])
        contains = any(start <= first and last <= end for first, last in ranges)
        if start < end and products >= _DENSE * (end - start) and not contains:
            ranges.append((start, end))
    for start, end in ranges:
        waiting = _waiting(code, labels, start, end)
        body = [code[i] for i in range(start, end + 1) if i not in waiting]
        products = sum(bool(part.registers) for part in body)
        yield Loop(products, _longest_chain(body), sum(part.stall for part in body))


def _waiting(code: list[Instruction], labels: dict[str, int], start: int, end: int) -> set[int]:
    """Return the instructions in a range that are executed only while a barrier is waited for.

    They are what a branch over a loop skips, if the loop checks a phase and has no product.
    """
    found: set[int] = set()
    for at in range(start, end + 1):
        target = _BRANCH.search(code[at].text)
        skipped = range(at + 1, labels.get(target[1], 0)) if target else range(0)
        parts = [code[i] for i in skipped]
        if any(_WAIT in part.text for part in parts) and not any(part.registers for part in parts):
            found |= {*skipped}
    return found


def _parse(lines: list[str], kernel: str) -> tuple[list[Instruction], dict[str, int]]:
    """Return the instructions of a kernel, and the numbers of those that labels stand before."""
    code: list[Instruction] = []
    labels: dict[str, int] = {}
    is_inside, text = False, ""
    for line in lines:
        if line.startswith(".text."):
            is_inside = line.startswith(f".text.{kernel}:")
        elif not is_inside:
            continue
        elif label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            text = instruction[2]
        elif text and (half := _UPPER_HALF.match(line)):
            code.append(Instruction(text, int(half[1], 16) >> _STALL_BITS & 15))
            text = ""
    return code, labels


def _longest_chain(body: list[Instruction]) -> int:
    """Return the most multiply-adds of which each adds to the result of the one before."""
    lengths: dict[str, int] = {}
    for instruction in body:
        if registers := instruction.registers:
            lengths[registers[0]] = lengths.get(registers[3], 0) + 1
    return max(lengths.values())


def longest_loop(cubin: Path, kernel: str) -> Loop:
    """Return the loop of the longest chain; RuntimeError if there is none."""
    program = disassembler()
    if program is None:
        raise RuntimeError("nvdisasm is missing: pip install nvidia-cuda-nvdisasm")
    command = [program, "-hex", str(cubin)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found = list(loops(done.stdout.splitlines(), kernel))
    if not found:
        raise RuntimeError(f"{kernel} has no loop of products")
    return max(found, key=lambda loop: loop.chained)


if __name__ == "__main__":
    print(longest_loop(Path(sys.argv[1]), *(sys.argv[2:] or ["pass"])))
