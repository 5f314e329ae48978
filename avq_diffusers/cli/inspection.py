"""`avq inspect`: a table of codebooks."""

from collections.abc import Mapping

from avq_diffusers.codebook.codebook import Codebook
from avq_diffusers.hosts.codebooks import AVQCodebooks
from avq_diffusers.hosts.core import as_table, short_names

HEADINGS = ("layer", "level", "heads", "config", "spread", "error", "capture", "active")
LEGEND = """spread: of children around their parent; error: quantization, in key variances
capture: share of attention on refined parents; active: share of codewords in use"""
METRICS = ("quantization_error", "capture", "active_ratio")


def print_codebooks(codebooks: AVQCodebooks) -> None:
    """Print sizes, codeword spread and metrics of calibration or training, by layer."""
    metrics = _metrics(codebooks)
    config = codebooks.config
    kind = "own codewords" if config["own_codewords"] else "codebooks"
    rows: list[tuple[str, ...]] = [HEADINGS]
    shown_names = short_names([*codebooks.layer_specs])
    for shown_name, (name, spec) in zip(shown_names, codebooks.layer_specs.items(), strict=True):
        measured, codebook = metrics.get(name, {}), codebooks.codebook(name)
        row = (
            shown_name,
            str(spec.level),
            f"{spec.num_heads}x{spec.head_dim}",
            str(codebooks.layer_config(name)),
            "-" if codebook is None else f"{_child_spread(codebook):.3f}",
            *(f"{measured[key]:.3f}" if key in measured else "-" for key in METRICS),
        )
        rows.append(row)
    print(f"{codebooks.avq_config} {kind} of {config['base_model']}\n{as_table(rows)}\n{LEGEND}")


def _metrics(codebooks: AVQCodebooks) -> dict[str, Mapping[str, float]]:
    """What calibration or training measured, by layer."""
    config = codebooks.config
    layers = (config["calibration"] or config["training"] or {}).get("layers")
    if not isinstance(layers, Mapping):
        return {}
    return {name: metrics for name, metrics in layers.items() if isinstance(metrics, Mapping)}


def _child_spread(codebook: Codebook) -> float:
    """RMS distance of children to their parent, divided by that of parents to their mean."""
    if codebook.children.shape[2] == 0:
        return 0.0
    children = (codebook.children - codebook.parents[:, :, None]).square().sum(-1).mean()
    parents = codebook.parents - codebook.parents.mean(1, keepdim=True)
    return float((children / parents.square().sum(-1).mean()).sqrt())
