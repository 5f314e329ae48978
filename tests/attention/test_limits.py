"""README states the limits of the kernels that dispatch reads."""

from pathlib import Path

from avq_diffusers.extras.hub.build import limits

README = Path(__file__).parents[2] / "README.md"


def test_readme_states_the_limits_of_the_kernels():
    """Catches a limit that moves without its sentence."""
    assert f"{limits()};" in " ".join(README.read_text().split())
