"""Print how long imports and `avq --help` take: `python tests/import_times.py`."""

import subprocess
import sys
from resource import RUSAGE_CHILDREN, getrusage
from time import perf_counter

STATEMENTS = (
    "import torch",
    "from diffusers import UNet2DConditionModel",
    "import avq_diffusers",
    "from avq_diffusers import apply_avq",
    "from avq_diffusers.cli.main import app; app(['--help'], standalone_mode=False)",
)

if __name__ == "__main__":
    print(f"{'CPU s':>6} {'wall s':>6}  statement")
    for statement in STATEMENTS:
        start, cpu = perf_counter(), getrusage(RUSAGE_CHILDREN)
        command = [sys.executable, "-c", statement]
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
        wall, used = perf_counter() - start, getrusage(RUSAGE_CHILDREN)
        seconds = used.ru_utime - cpu.ru_utime + used.ru_stime - cpu.ru_stime
        print(f"{seconds:6.2f} {wall:6.2f}  {statement}", flush=True)
