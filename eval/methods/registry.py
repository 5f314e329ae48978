"""The attentions that are compared, by name.

A name is a word (`exact`, `pisa@.15`), a configuration (`M64C8T1e-4`, `M64/stored`) or a folder;
the module of each class says what its names mean. A new competitor is one class in one file, and
one entry here.
"""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eval.methods.avq import LEVELS, Configuration, Own, Stored, source_of
from eval.methods.base import AttentionMethod, Word
from eval.methods.exact import Exact, SpeedLimit, ValueProjection
from eval.methods.folder import Folder, LinFusion
from eval.methods.peer import Peer
from eval.methods.pisa import Pisa
from eval.methods.sol import Sol
from eval.methods.tome import ToMe
from eval.store.markdown import figure

WORDS: tuple[type[Word], ...] = (Exact, ValueProjection, ToMe, SpeedLimit, LinFusion, Pisa, Sol)
EXACT, NO_ATTENTION, TOME = Exact.kind, ValueProjection.kind, ToMe.kind
LIMIT, LINFUSION = SpeedLimit.kind, LinFusion.kind
AVQ = "avq"  # `apply_avq(pipe)`, in `bench steps`
PEERS = tuple(word.kind for word in WORDS if issubclass(word, Peer))
PATH_SIGNS = "/\\"  # no configuration contains one


def parse_method(name: str, levels: tuple[int, ...]) -> AttentionMethod:
    """Parse the name of a method; configurations without `@L` get `levels`.

    Raises:
        ValueError: the name is malformed, there is no such folder, or it is both a folder and a
            configuration.
    """
    for word in WORDS:
        if found := word.parse(name, levels):
            return found
    folder = Folder.parse(name, levels)
    try:
        configuration = Configuration.parse(name, levels)
    except ValueError as error:
        if folder is not None:
            return folder
        if any(sign in source_of(name) for sign in PATH_SIGNS):
            raise ValueError(f"methods: there is no folder {Folder.path_of(name)}.") from None
        words = ", ".join(word.kind for word in WORDS if word.example == word.kind)
        raise ValueError(
            f"methods must be {words}, folders of codebooks or of LinFusion layers, or "
            f"configurations such as M64C8T1e-4, M64P16C8, M64P16C8@L0, M64P16C8-up_blocks.2 or "
            f"M64P16C8@P8: {error}"
        ) from None
    if folder is not None:
        raise ValueError(
            f"methods: {folder.source} is a configuration, but also a folder here; write "
            f"./{folder.source} for the folder."
        )
    return configuration


def check_place(name: str, place: str) -> None:
    """Refuse a method that does not run in one of the places of `base`.

    Raises:
        ValueError: it does not run there, or there is no such method.
    """
    if place not in parse_method(name, LEVELS).places:
        classes = (*WORDS, Folder, Stored, Own)
        known = [cls.example for cls in classes if place in cls.places]
        raise ValueError(f"methods for {place} are {', '.join(known)}, but got {name!r}.")


def timed_method(name: str) -> AttentionMethod:
    """Parse the name of a method for a step; default levels are 0 and 1, for tome its own.

    Raises:
        ValueError: see `parse_method`.
    """
    method = parse_method(name, LEVELS)
    if isinstance(method, ToMe):
        return replace(method, levels=method.levels or method.usual_levels)
    return method


def method_label(name: str) -> str:
    """What tables and plots print; an unknown name, as an older result may have, stays as it is."""
    try:
        return timed_method(name).label
    except ValueError:
        return name


def row_label(row: Mapping[str, Any]) -> str:
    """The method, with its configuration if the name does not give it."""
    name, config = row["method"], row.get("config")
    return name if config in (None, name) else f"{name} ({config})"


METHOD_COLUMNS = {"method": row_label, "effective codewords": figure("effective_codewords")}
