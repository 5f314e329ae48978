"""What users meet: `faults`, `soak`, `features`."""

import sys
from pathlib import Path
from typing import Annotated

import torch
import typer

from avq_diffusers.cli.options import device_of
from eval.commands.options import Device, Output, command_line
from eval.store.report import RESULTS, save_json

app = typer.Typer()


@app.command("faults")
def faults_command(
    kills: Annotated[int, typer.Option(min=1, help="Of every job.")] = 50,
    jobs: Annotated[
        str, typer.Option(help="Comma-separated: calibration, distillation, generation, scoring.")
    ] = "calibration,distillation,generation,scoring",
    seed: Annotated[int, typer.Option(help="Of the moments of kills.")] = 0,
    output: Output = RESULTS,
) -> None:
    """Kill the real commands at random moments, fill their disks, damage their files.

    Nothing half-written may count as whole, and what is run again must end in the same bytes. Runs
    on the CPU with a tiny model; the exit code is 1 if anything went wrong.

    Example: python -m eval faults --kills 50
    """
    from tempfile import TemporaryDirectory

    from eval.faults import failures_of, faults_table, run_faults

    with TemporaryDirectory() as place:
        killed, faults = run_faults(Path(place), jobs.split(","), kills=kills, seed=seed)
    print(faults_table(killed, faults))
    failures = failures_of([*killed, *faults])
    save_json(
        output / "faults_cpu.json",
        command=command_line(),
        device="cpu",
        seed=seed,
        kills=killed,
        faults=faults,
        num_failures=len(failures),
    )
    for text in failures:
        print(f"failure: {text}", file=sys.stderr)
    if failures:
        raise typer.Exit(1)


@app.command("soak")
def soak_command(
    minutes: Annotated[float, typer.Option(min=0, help="Of cases, after the pictures.")] = 10,
    seed: Annotated[int, typer.Option(help="Of all cases.")] = 0,
    first: Annotated[int, typer.Option(min=0, help="Number of the first case.")] = 0,
    generations: Annotated[int, typer.Option(min=20, help="Pictures to see memory over.")] = 500,
    device: Device = "cpu",
    output: Output = RESULTS,
) -> None:
    """Random problems against the definition, damaged files, memory over pictures, threads.

    Kernels on cuda, PyTorch elsewhere. The exit code is 1 if anything went wrong.

    Example: python -m eval soak --minutes 12

    One case again: python -m eval soak --seed 0 --first 1234 --minutes 0 --generations 20
    """
    from eval.soak import soak, soak_table

    found = soak(
        minutes, device=device_of(device), seed=seed, first_case=first, generations=generations
    )
    print(soak_table(found))
    name = torch.device(device).type
    save_json(output / f"soak_{name}.json", command=command_line(), device=device, **found)
    for failure in found["failures"]:
        print(f"failure: {failure}", file=sys.stderr)
    if found["failures"]:
        raise typer.Exit(1)


@app.command("features")
def features_command(
    full_size: Annotated[
        bool, typer.Option("--full-size", help="Build UNets of the real sizes as well.")
    ] = False,
    output: Output = RESULTS,
) -> None:
    """Run the tests that show which features of diffusers work with AVQ, and write the table.

    On a machine with a GPU these are the tests that need one, and the GPU's column is written.

    Example: python -m eval features --full-size
    """
    from eval.features import run_features

    if not run_features(output, command=command_line(), full_size=full_size):
        raise typer.Exit(1)
