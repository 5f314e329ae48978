"""What limits each kernel, by Nsight Compute's counters: `python -m eval bench counters`.

`ncu` must be on the path and allowed to read the counters. It runs this module, which calls the
operation at SD1.5's shapes and the paper's, and reads the last call of each.
"""

import csv
import io
import subprocess
import sys
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch

from avq_diffusers import AVQConfig, avq_attention
from eval.benchmarks.inputs import KeySource, Shape
from eval.store.markdown import markdown_table, number
from eval.store.report import save_json

SHAPES = {
    "level 0, 512 px": Shape(2, 8, 4096, 40),
    "level 0, 2048 px": Shape(2, 8, 65536, 40),
    "level 1, 1024 px": Shape(2, 8, 4096, 80),
    "paper, N = 64k": Shape(4, 12, 65536, 64),
}
CONFIGS = ("M64P16C8", "M256")
KERNELS = ("sort_kernel", "aggregate_kernel", "_attention_kernel")
# Name in Nsight Compute's details and name in the result.
COUNTERS = {
    "Duration": "duration",
    "Executed Ipc Active": "instructions_per_cycle",
    "Issue Slots Busy": "issue_slots_busy_percent",
    "No Eligible": "no_eligible_warp_percent",
    "Achieved Occupancy": "occupancy_percent",
    "Registers Per Thread": "registers_per_thread",
    "L1/TEX Hit Rate": "l1_hit_percent",
    "L2 Hit Rate": "l2_hit_percent",
    "L2 Cache Throughput": "l2_throughput_percent",
    "DRAM Throughput": "dram_throughput_percent",
    "Memory Throughput": "dram_bytes_per_second",
}
UNITS = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0}
UNITS |= {"byte/s": 1.0, "Kbyte/s": 1e3, "Mbyte/s": 1e6, "Gbyte/s": 1e9, "Tbyte/s": 1e12}
SECTIONS = (
    "SpeedOfLight",
    "ComputeWorkloadAnalysis",
    "MemoryWorkloadAnalysis",
    "SchedulerStats",
    "Occupancy",
    "LaunchStats",
)
PROFILER = (
    "ncu",
    *(argument for section in SECTIONS for argument in ("--section", section)),
    *("--profile-from-start", "off", "--clock-control", "none", "--page", "details", "--csv"),
)


def run_counters(device: torch.device, output: Path, *, command: str) -> None:
    """Profile every kernel at every shape, print a table and write a JSON file.

    Raises:
        ValueError: `device` is not CUDA, or Nsight Compute is missing or fails.
    """
    if device.type != "cuda":
        raise ValueError("counters need --device cuda.")
    launches = _profile()
    cases = [case for case in product(SHAPES.items(), CONFIGS) for _ in KERNELS]
    if len(launches) != len(cases):
        raise ValueError(f"expected counters of {len(cases)} launches, but got {len(launches)}.")
    rows = [
        {"shape": str(shape), "name": name, "config": config, **launch}
        for ((name, shape), config), launch in zip(cases, launches, strict=True)
    ]
    save_json(output / "bench_counters_cuda.json", command=command, device=device, rows=rows)
    print(counters_table(rows))


def counters_table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    fields = list(COUNTERS.values())
    return markdown_table(
        ["shape", "config", "kernel", *(field.replace("_", " ") for field in fields)],
        (
            [row["name"], row["config"], row["kernel"], *(number(row.get(x)) for x in fields)]
            for row in rows
        ),
    )


def read_details(text: str) -> list[dict[str, Any]]:
    """Counters of each launch, in SI units, from the details page of `ncu --csv`.

    Raises:
        ValueError: there is no launch.
    """
    if '"ID"' not in text:
        raise ValueError(f"ncu counted in no kernel: {text.strip()[-200:]!r}")
    table = text[text.index('"ID"') :]
    launches: dict[str, dict[str, Any]] = {}
    for line in csv.DictReader(io.StringIO(table)):
        field = COUNTERS.get(line["Metric Name"])
        if field is None:
            continue
        launch = launches.setdefault(line["ID"], {"kernel": line["Kernel Name"]})
        unit, value = line["Metric Unit"], float(line["Metric Value"].replace(",", ""))
        # The percentage of the same name is that of the busiest memory.
        if field == "dram_bytes_per_second" and unit not in UNITS:
            continue
        launch[field] = value * UNITS.get(unit, 1.0)
    return list(launches.values())


def _profile() -> list[dict[str, Any]]:
    target = [sys.executable, "-m", "eval.benchmarks.counters"]
    try:
        done = subprocess.run(
            [*PROFILER, "-k", f"regex:{'|'.join(KERNELS)}", *target],
            capture_output=True,
            text=True,
            check=True,
        )
    except FileNotFoundError:
        raise ValueError("counters need Nsight Compute: put ncu on the path.") from None
    except subprocess.CalledProcessError as error:
        raise ValueError(f"ncu failed: {(error.stdout + error.stderr).splitlines()[-1]}") from None
    return read_details(done.stdout)


@torch.no_grad()
def _run_cases() -> None:
    """Each case twice: once to compile, once to be profiled."""
    for shape in SHAPES.values():
        source = KeySource(shape.num_heads, shape.head_dim, torch.device("cuda"))
        query, key, value = source.inputs(shape, torch.float16)
        for name in CONFIGS:
            config = AVQConfig.parse(name)
            call = partial(
                avq_attention,
                *(query, key, value, source.codebook(config)),
                num_refined=config.num_refined,
                backend="triton",
            )
            call()
            torch.cuda.profiler.start()
            call()
            torch.cuda.profiler.stop()


if __name__ == "__main__":
    _run_cases()
