"""Names of AVQ configurations that say where codewords come from.

M64C8T1e-4               a threshold, with codewords from the keys of each call
M64P16C8, M192           codewords from a codebook: the paper's form, and flat VQ
M64P16C8/means           mean keys in place of a codebook's codewords
M64P16C8/own, .../own1   codewords from the keys of each call; with one update
"""

import re
from typing import Any

from avq_diffusers import AVQConfig
from avq_diffusers.config import sizes_of

FORM = re.compile(r"(.+?)(?:/(?:(means)|own(\d*)))?")


def parse_codewords(name: str, **fields: Any) -> tuple[AVQConfig, bool]:
    """The configuration of a name, and whether codewords come from the keys of each call.

    Args:
        name: see above.
        fields: other fields of the configuration.

    Raises:
        ValueError: the name is malformed.
    """
    sizes, means, updates = FORM.fullmatch(name).groups()
    own = updates is not None or ("threshold" in sizes_of(sizes) and not means)
    codewords = "means" if own or means else "stored"
    config = AVQConfig.parse(sizes, codewords=codewords, num_updates=int(updates or 0), **fields)
    return config, own
