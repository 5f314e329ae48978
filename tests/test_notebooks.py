"""The notebooks run from a clean kernel at reduced size, and hold the outputs of a clean run."""

import os
import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from safetensors.torch import save_file
from tiny_vision import SIZES, tiny_vision

from eval.keys.vit import DECODER_FILE, SaliencyDecoder

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "notebooks"
# What follows in the cell that is tagged "parameters".
REDUCED = {
    "quick_start": "STEPS, SIZE, MEASURED_STEPS = 1, 64, 1",
    "what_the_codebook_learns": "STEPS, SIZE = 1, 64",
    "vision": "VIT, SIZE, LAYER, HEAD = Path({folder!r}) / 'vit', 96, 1, 0",
    "distil_your_own": """
STEPS, TRAINING_SIZE, SIZE, SAMPLE_STEPS, PROMPTS, ERROR_STEPS = 2, 64, 64, 1, 1, 1
RUN = Path({folder!r}) / "run"
""",
}
MOST_BYTES = 2 * 2**20
OF_ONE_MACHINE = re.compile(r"/(home|root|Users|tmp|opt|work|var)/|site-packages|[Ww]arning")


def read(name):
    return nbformat.read(FOLDER / f"{name}.ipynb", as_version=4)


def run(name, parameters):
    """The notebook, executed in its folder as a person would."""
    notebook = read(name)
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    cell.source += f"\n{parameters}"
    # A person has neither the interpreter of kernels, which conftest.py chooses, nor this path.
    inherited = os.environ.copy()
    for name in ("TRITON_INTERPRET", "PYTHONPATH"):
        inherited.pop(name, None)
    client = NotebookClient(notebook, timeout=300, resources={"metadata": {"path": str(FOLDER)}})
    client.execute(env=inherited | {"OMP_NUM_THREADS": "1"})
    return notebook


def save_tiny_vit(folder):
    """In place of the ViT that `python -m eval keys --download` fetches."""
    tiny_vision("dinov2").save_pretrained(folder)
    save_file(SaliencyDecoder(SIZES["hidden_size"], 8).state_dict(), folder / DECODER_FILE)


def outputs(notebook):
    """{kind: text} of what each code cell shows; kinds are streams, "error" and MIME types."""
    return [
        {kind: text for output in cell.outputs for kind, text in of_output(output).items()}
        for cell in notebook.cells
        if cell.cell_type == "code"
    ]


def of_output(output):
    if output.output_type == "stream":
        return {output.name: output.text}
    return {"error": output.evalue} if output.output_type == "error" else output.data


def assert_clean(shown):
    assert not {kind for cell in shown for kind in cell} & {"stderr", "error"}


@pytest.mark.long
@pytest.mark.parametrize("name", REDUCED)
def test_runs(name, tmp_path):
    """Catches a cell that raises or warns, and one that no longer shows what is stored."""
    if name == "vision":
        save_tiny_vit(tmp_path / "vit")
    executed = outputs(run(name, REDUCED[name].format(folder=str(tmp_path))))
    assert_clean(executed)
    assert [set(cell) for cell in executed] == [set(cell) for cell in outputs(read(name))]


@pytest.mark.parametrize("name", REDUCED)
def test_stored_outputs(name):
    """Catches a notebook stored without a run, out of order, or with traces of a machine."""
    counts = [cell.execution_count for cell in read(name).cells if cell.cell_type == "code"]
    assert counts == list(range(1, len(counts) + 1))
    shown = outputs(read(name))
    assert any("image/png" in cell for cell in shown)
    assert_clean(shown)
    for cell in shown:
        for kind in cell.keys() - {"image/png"}:
            assert OF_ONE_MACHINE.search(cell[kind]) is None, cell[kind]


def test_folder():
    """Catches a notebook that no test runs, and images that make every clone slow."""
    stored = list(FOLDER.glob("*.ipynb"))
    assert {path.stem for path in stored} == set(REDUCED)
    assert sum(path.stat().st_size for path in stored) <= MOST_BYTES
