"""Compile every kernel for GPUs that are not present, and inspect the result: `bench variants`.

Triton compiles for any compute capability and ships NVIDIA's assembler and disassembler, so this
needs no GPU. It caches what it has compiled: a killed command continues where it stopped. Does not
work in a process that interprets kernels.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import triton
from tqdm import tqdm
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from avq_diffusers.attention.limits import LIMITS, matrix_instructions
from avq_diffusers.attention.triton import call, gradients
from avq_diffusers.attention.triton.launch import Launch, Pointer, each
from avq_diffusers.attention.triton.problem import Layout, Problem
from eval.methods.avq import Configuration
from eval.store.markdown import markdown_table, rows_table

Row = dict[str, Any]

BATCH, HEADS, TOKENS = 2, 8, 4096
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
POINTERS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.int8: "*i8",
}
# Most kibibytes of shared memory per program.
MOST_SHARED = {80: 163, 86: 99, 89: 99, 90: 227, 100: 227, 120: 99}
MOST_SPILLED = 0.01
INTRODUCTION = f"""# Compiled variants

What Triton compiles each kernel to, for GPUs that were not at hand. A kernel should spill at most
{MOST_SPILLED:.0%} of its instructions and fit the GPU's shared memory; one that does not is slower
there, or does not start.

- *Call* is the configuration. *Sinks* are keys that every query attends to exactly. *sm_86* is
  compute capability 8.6, and so on.
- *Registers* are per thread, at most 255. *Spilled* is the share of instructions that move
  registers to memory and back.
- *Stack* is in bytes per thread; *shared KiB* and *tensor memory* (in columns, at most 512) are per
  program.
"""


class KernelCase(NamedTuple):
    """A call whose kernels are compiled, for compute capability `capability` (86 is sm_86)."""

    capability: int
    dtype: torch.dtype
    head_dim: int
    method: str
    sinks: int

    @property
    def is_served(self) -> bool:
        """Whether the kernels serve it."""
        is_wide = self.head_dim > LIMITS["triton"]["head dim of float32"].value
        has_wgmma = matrix_instructions(divmod(self.capability, 10)) == "wgmma"
        return self.dtype != torch.float32 or has_wgmma or not is_wide


def variant_rows(cases: Iterable[KernelCase]) -> list[Row]:
    """What each kernel of the cases costs. A kernel shared by several cases is listed once.

    registers: per thread.
    stack: bytes per thread; more than 0 means a spill or an array indexed at run time.
    shared: bytes per program, including software pipelining buffers.
    tensor_memory: columns per program, out of 512.
    instructions, spilled: number, loops counted once, and the share that moves spilled registers.
    narrow_loads: number of two-byte loads.
    hopper_products: number of warp-group matmuls.
    """
    rows: dict[str, Row] = {}
    for case in tqdm([case for case in cases if case.is_served], "calls"):
        for launch in launches(case):
            compiled = compiled_for(launch, case.capability)
            if compiled.hash not in rows:
                named = case._asdict() | {"dtype": str(case.dtype).removeprefix("torch.")}
                name = launch.kernel.__name__.removesuffix("_kernel")
                rows[compiled.hash] = {"kernel": name, **named, **costs(compiled)}
    return list(rows.values())


def is_within(row: Row) -> bool:
    """Whether a kernel spills little and fits the GPU."""
    is_small = row["shared"] <= MOST_SHARED[row["capability"]] << 10
    return row["spilled"] <= MOST_SPILLED and is_small and row["tensor_memory"] <= 512


def variants_table(rows: Sequence[Row]) -> str:
    """The worst head dim for each kernel, call and capability, and what exceeds a bound."""
    names = list(dict.fromkeys((x["kernel"], x["method"], x["sinks"]) for x in rows))
    capabilities = list(dict.fromkeys(row["capability"] for row in rows))
    cells = []
    for name in names:
        found = [row for row in rows if (row["kernel"], row["method"], row["sinks"]) == name]
        by_capability = ([x for x in found if x["capability"] == each] for each in capabilities)
        cells.append([*map(str, name), *map(_worst, by_capability)])
    header = ["kernel", "call", "sinks", *(f"sm_{each}" for each in capabilities)]
    missed = [row for row in rows if not is_within(row)]
    columns = {
        "kernel": "kernel",
        "call": "method",
        "sinks": "sinks",
        "target": lambda row: f"sm_{row['capability']}",
        "head dim": "head_dim",
        "registers": "registers",
        "spilled": lambda row: f"{row['spilled']:.1%}",
        "stack": "stack",
        "shared KiB": lambda row: row["shared"] / 1024,
        "tensor memory": "tensor_memory",
    }
    return (
        f"{len(rows)} kernels, of which {len(missed)} miss a bound. The head dim that needs most: "
        f"registers, spilled, shared KiB.\n\n{markdown_table(header, cells)}\n\n"
        f"Kernels that miss a bound:\n\n"
        f"{rows_table(columns, missed)}"
    )


def variants_page(documents: Iterable[Mapping[str, Any]]) -> str:
    """The tables of several results as a Markdown page."""
    parts = [
        f"## {document['rows'][0]['dtype']}\n\n`{document['command']}`, Triton "
        f"{document['environment']['triton']}, {document['environment']['commit'][:9]}. "
        f"{variants_table(document['rows'])}\n"
        for document in documents
    ]
    return "\n".join([INTRODUCTION, *parts])


def _worst(rows: Sequence[Row]) -> str:
    if not rows:
        return "-"
    registers, spilled, shared = (
        max(row[name] for row in rows) for name in ("registers", "spilled", "shared")
    )
    return f"{registers}, {spilled:.1%}, {shared / 1024:.0f}"


def launches(case: KernelCase) -> list[Launch]:
    """All launches of a call: the forward pass and, if served, gradients."""
    method = Configuration.parse(case.method, levels=(0,))
    config = method.config
    device, order = torch.device("cpu"), torch.int64
    tokens, sinks = (
        Layout(
            torch.Size((BATCH, HEADS, number, case.head_dim)),
            (number * HEADS * case.head_dim, case.head_dim, HEADS * case.head_dim, 1),
        )
        for number in (TOKENS, case.sinks)
    )
    spec = config.spec
    problem = Problem(
        device=device,
        capability=divmod(case.capability, 10),
        dtype=case.dtype,
        query=tokens,
        key=tokens,
        value=tokens,
        sinks=(sinks, sinks) if case.sinks else None,
        query_order=order,
        key_order=order if method.own else None,
        is_stored=not method.own,
        spec=spec,
        scale=0.1,
    )
    found = list(call._plan(problem).launches)
    if gradients.serves(torch.empty(0, dtype=case.dtype), means=spec.means):
        found += gradients._plan(problem, tokens).launches
    return found


def compiled_for(launch: Launch, capability: int) -> triton.compiler.CompiledKernel:
    """The kernel, compiled as for its launch; Triton caches it on disk."""
    names = launch.kernel.arg_names
    signature = {name: each(_kind_of, x) for name, x in launch.arguments.items()}
    signature = {name: signature.get(name, "constexpr") for name in names}
    constants = {(names.index(name),): x for name, x in launch.compiled_constants().items()}
    attributes = {}
    for path, kind in _leaves(tuple(signature.values())):
        if kind.startswith("*"):  # torch aligns what it allocates
            attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    return triton.compile(source, GPUTarget("cuda", capability, 32), launch.options)


def costs(compiled: triton.compiler.CompiledKernel) -> Row:
    """The fields of a row with the cost of one program, from its machine code."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        command = [str(CUOBJDUMP), "-res-usage", "-sass", cubin.name]
        text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = re.search(r"REG:(\d+) STACK:(\d+)", text).groups()
    line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
    opcodes = re.findall(line, text, re.MULTILINE)

    def count(*prefixes: str) -> int:
        return sum(opcode.startswith(prefixes) for opcode in opcodes)

    return {
        "registers": int(registers),
        "spilled": count("LDL", "STL") / len(opcodes),
        "stack": int(stack),
        "shared": compiled.metadata.shared,
        "tensor_memory": compiled.metadata.tmem_size,
        "instructions": len(opcodes),
        "narrow_loads": count("LDG.E.U16"),
        "hopper_products": count("HGMMA"),
    }


def _kind_of(value: Pointer | float | None) -> str:
    """An argument's type in the compiler's notation."""
    if value is None:
        return "*u8"
    if isinstance(value, Pointer):
        return POINTERS[value.dtype]
    return "fp32" if isinstance(value, float) else "i32"


def _leaves(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """All types in nested tuples, with their paths."""
    if isinstance(value, tuple):
        for index, item in enumerate(value):
            yield from _leaves(item, (*path, index))
    else:
        yield path, value
