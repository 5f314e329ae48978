"""Compiles Triton kernels for GPUs that are not there and reads what the assembler made of them.

Works only in a process that did not set TRITON_INTERPRET.
"""

import re
import subprocess
import tempfile
from collections import Counter
from pathlib import Path
from typing import NamedTuple

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from avq_diffusers.attention.triton.launch import Launch

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"


class CompiledInfo(NamedTuple):
    """What one program of a kernel costs.

    stack: bytes per thread; more than 0 is a spill or an array that is indexed at run time.
    registers: per thread.
    shared: bytes per program, with the buffers of software pipelining.
    sass: the disassembly.
    """

    stack: int
    registers: int
    shared: int
    sass: str

    def instructions(self) -> list[str]:
        """The opcodes in order, with their modifiers: `LDG.E.128.CONSTANT`."""
        line = r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][A-Z0-9_.]+)"
        return re.findall(line, self.sass, re.MULTILINE)

    def count(self, *prefixes: str) -> int:
        """How many instructions start with one of the prefixes, loops counted once."""
        return sum(opcode.startswith(prefixes) for opcode in self.instructions())

    def histogram(self) -> Counter[str]:
        return Counter(opcode.split(".")[0] for opcode in self.instructions())


def compile_for(
    kernel: triton.JITFunction,
    signature: dict[str, str],
    constexprs: dict[str, object],
    *,
    capability: int,
    num_warps: int,
    num_stages: int,
    maxnreg: int | None = None,
) -> CompiledInfo:
    """Compile `kernel` for compute capability `capability` (86 is sm_86).

    Args:
        signature: type of every argument that is not a constant: `"*fp16"` for a pointer, which
            counts as 16-byte aligned as torch allocates it; `"i32"` for an integer, and
            `"i32:16"` for one that is a multiple of 16.
        constexprs: value of every constant. An argument that is neither here nor in `signature` is
            an error.
        maxnreg: most registers per thread; None leaves it to the assembler.
    """
    missing = set(kernel.arg_names) - set(signature) - set(constexprs)
    unknown = (set(signature) | set(constexprs)) - set(kernel.arg_names)
    assert not missing, f"no value for {missing}"
    assert not unknown, f"{kernel.__name__} has no argument {unknown}"
    aligned = {name for name, kind in signature.items() if kind.startswith("*") or ":16" in kind}
    source = ASTSource(
        fn=kernel,
        signature={
            name: signature.get(name, "constexpr").split(":")[0] for name in kernel.arg_names
        },
        constexprs=constexprs,
        attrs={
            (position,): [["tt.divisibility", 16]]
            for position, name in enumerate(kernel.arg_names)
            if name in aligned
        },
    )
    options = {"num_warps": num_warps, "num_stages": num_stages, "maxnreg": maxnreg}
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as cubin:
        cubin.write(compiled.asm["cubin"])
        cubin.flush()
        usage = _cuobjdump("-res-usage", cubin.name)
        sass = _cuobjdump("-sass", cubin.name)
    return CompiledInfo(
        stack=int(re.search(r"STACK:(\d+)", usage)[1]),
        registers=int(re.search(r"REG:(\d+)", usage)[1]),
        shared=compiled.metadata.shared,
        sass=sass,
    )


def compile_launch(launch: Launch, *, capability: int) -> CompiledInfo:
    """Compile a kernel as it is launched, for compute capability `capability` (86 is sm_86)."""
    kinds = {torch.float16: "*fp16", torch.float32: "*fp32"}
    kinds |= {torch.int32: "*i32", torch.int64: "*i64"}
    values = *launch.dtypes.values(), *launch.numbers.values()
    arguments = dict(zip(launch.kernel.arg_names, values, strict=False))
    signature = {
        name: kinds.get(value, "i32") for name, value in arguments.items() if value is not None
    }
    constants = dict.fromkeys(arguments.keys() - signature.keys()) | launch.constants
    options = {name: constants.pop(name, None) for name in ("num_warps", "num_stages", "maxnreg")}
    return compile_for(launch.kernel, signature, constants, capability=capability, **options)


def _cuobjdump(option: str, path: str) -> str:
    command = [str(TOOLS / "cuobjdump"), option, path]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout
