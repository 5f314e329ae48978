"""Names of AVQ configurations that say where codewords come from.

M64C8T1e-4               a threshold, with codewords from the keys of each call
M64P16C8, M192           codewords from a codebook: the paper's form, and flat VQ
M64P16C8/means           mean keys in place of a codebook's codewords
M64P16C8/own             codewords from the keys of each call
"""

import re
from typing import Any

from avq_diffusers import AVQConfig
from avq_diffusers.config import sizes_of

FORM = re.compile(r"(.+?)(?:/(means|own))?")


def parse_codewords(name: str, **fields: Any) -> tuple[AVQConfig, bool]:
    """The configuration of a name, and whether codewords come from the keys of each call.

    Args:
        name: see above.
        fields: other fields of the configuration.

    Raises:
        ValueError: the name is malformed.
    """
    sizes, form = FORM.fullmatch(name).groups()
    own = form == "own" or ("threshold" in sizes_of(sizes) and form is None)
    codewords = "means" if own or form else "stored"
    return AVQConfig.parse(sizes, codewords=codewords, **fields), own
