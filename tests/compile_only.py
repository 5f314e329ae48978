"""Compiles Triton kernels for GPUs that are not there and reads what the assembler made of them.

Works only in a process that did not set TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from avq_diffusers.attention.triton.launch import Launch, Pointer, each

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompiledInfo(NamedTuple):
    """What one program of a kernel costs.

    stack: bytes per thread; more than 0 is a spill or an array that is indexed at run time.
    shared: bytes per program, with the buffers of software pipelining.
    sass: the disassembly.
    """

    stack: int
    shared: int
    sass: str

    def instructions(self) -> list[str]:
        """The opcodes in order, with their modifiers: `LDG.E.128.CONSTANT`."""
        line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
        return re.findall(line, self.sass, re.MULTILINE)

    def count(self, *prefixes: str) -> int:
        """How many instructions start with one of the prefixes, loops counted once."""
        return sum(opcode.startswith(prefixes) for opcode in self.instructions())


KINDS = {
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float32: "*fp32",
    torch.int32: "*i32",
    torch.int64: "*i64",
}


def compile_launch(launch: Launch, *, capability: int) -> CompiledInfo:
    """Compile a kernel as it is launched, for compute capability `capability` (86 is sm_86)."""
    names = launch.kernel.arg_names
    signature = {name: each(kind_of, launch.arguments.get(name)) for name in names}
    constants = {(names.index(name),): x for name, x in launch.compiled_constants().items()}
    attributes = {}
    for path, kind in leaves(tuple(signature.values())):
        if kind == "constexpr":
            constants.setdefault(path, None)
        elif kind.startswith("*"):  # torch aligns what it allocates
            attributes[path] = [["tt.divisibility", 16]]
    source = ASTSource(
        fn=launch.kernel, signature=signature, constexprs=constants, attrs=attributes
    )
    target = GPUTarget("cuda", capability, 32)
    compiled = triton.compile(source, target=target, options=launch.options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("-res-usage", cubin.name)
        sass = _cuobjdump("-sass", cubin.name)
    return CompiledInfo(
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        sass=sass,
    )


def kind_of(value: Pointer | int | None) -> str:
    """How the compiler writes the type of an argument."""
    if isinstance(value, Pointer):
        return KINDS[value.dtype]
    return "constexpr" if value is None else "i32"


def leaves(value: object, path: tuple[int, ...] = ()) -> Iterator[tuple[tuple[int, ...], str]]:
    """All types in nested tuples, with where they are."""
    if isinstance(value, tuple):
        for place, item in enumerate(value):
            yield from leaves(item, (*path, place))
    else:
        yield path, value


def _cuobjdump(option: str, path: str) -> str:
    command = [str(TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
