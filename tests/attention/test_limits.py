"""README states the limits of the kernels that dispatch reads."""

from pathlib import Path

from avq_diffusers.attention.limits import LIMITS, MATRIX_INSTRUCTIONS, VERIFIED

README = Path(__file__).parents[2] / "README.md"


def test_readme_states_the_limits_of_the_kernels():
    """Catches a limit that moves without its sentence."""
    of = {name: limit.value for name, limit in LIMITS["triton"].items()}
    (vendor,), (major, minor), head_dims = of["vendor"], of["capability"], of["head dim"]
    *dtypes, last_dtype = (str(dtype).removeprefix("torch.") for dtype in of["dtype"])
    wide = " or ".join(str(x) for x, kind in MATRIX_INSTRUCTIONS.items() if kind == "wgmma")
    verified = " and ".join(f"{card} (Triton {triton})" for card, triton in VERIFIED.items())
    expected = (
        f"Triton kernels need an {vendor.upper()} GPU of compute capability {major}.{minor} or "
        f"higher, {', '.join(dtypes)} or {last_dtype}, head dims that are multiples of "
        f"{head_dims.step} up to {head_dims[-1]} (float32: {of['head dim of float32']}, and "
        f"{head_dims[-1]} on capability {wide}), query tiles of up to {of['query tile']}, and at "
        f"most {of['parents if tiles choose']} parents (flat: {of['parents']}) with "
        f"{of['children']} children. They are verified on {verified};"
    )
    assert expected in " ".join(README.read_text().split())
