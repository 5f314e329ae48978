"""README states the limits of the kernels that dispatch reads."""

from pathlib import Path

from avq_diffusers.attention.limits import LIMITS

README = Path(__file__).parents[2] / "README.md"


def test_readme_states_the_limits_of_the_kernels():
    """Catches a limit that moves without its sentence."""
    of = {name: limit.value for name, limit in LIMITS["triton"].items()}
    (vendor,), (major, minor), head_dims = of["vendor"], of["capability"], of["head dim"]
    *dtypes, last_dtype = (str(dtype).removeprefix("torch.") for dtype in of["dtype"])
    wide = LIMITS["triton"]["head dim of float32"].message.split()[-1]
    expected = (
        f"Triton kernels need an {vendor.upper()} GPU of compute capability {major}.{minor} or "
        f"higher, {', '.join(dtypes)} or {last_dtype}, head dims that are multiples of "
        f"{head_dims.step} up to {head_dims[-1]} (float32: {of['head dim of float32']} before "
        f"capability {wide}), query tiles of up to {of['query tile']}, and at most "
        f"{of['parents if tiles choose']} parents (flat: {of['parents']}) with {of['children']} "
        "children."
    )
    assert expected in " ".join(README.read_text().split())
