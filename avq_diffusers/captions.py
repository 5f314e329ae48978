"""Caption and prompt files: UTF-8 text with one per line, or a JSON list of strings."""

import codecs
import json
import re
from pathlib import Path
from typing import Any

from avq_diffusers.config import check_text

# Editors write a byte-order mark at the start; concatenated files contain several.
MARK = re.compile("^\ufeff", re.MULTILINE)
TABLES = (".csv", ".jsonl", ".tsv")


def read_caption_list(path: Path) -> list[str]:
    """Read the captions of a text or .json file, stripped of surrounding whitespace.

    A blank line is an empty caption.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is a table, not UTF-8, or JSON other than a list of strings.
    """
    if is_json(path):
        captions = read_json(path)
        if not isinstance(captions, list):
            raise ValueError(
                f"{path} must hold a JSON list of strings, but holds {_kind(captions)}."
            )
        return [
            checked_caption(caption, f"caption {number} of {path}").strip()
            for number, caption in enumerate(captions, 1)
        ]
    if path.suffix.lower() in TABLES:
        raise ValueError(
            f"{path} is a table; write its captions to a .txt file, one per line, or a JSON list."
        )
    # Not splitlines, which also splits at rarer separators inside a caption.
    return [line.strip() for line in read_text(path).removesuffix("\n").split("\n")]


def is_json(path: Path) -> bool:
    """Whether a file is JSON, by its name."""
    return path.suffix.lower() == ".json"


def read_text(path: Path) -> str:
    """Read a file and `decode_text` it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8.
    """
    return decode_text(path.read_bytes(), str(path))


def read_json(path: Path) -> Any:
    """Read a file and `decode_json` it.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not UTF-8 or not JSON.
    """
    return decode_json(path.read_bytes(), str(path))


def decode_json(content: bytes, name: str) -> Any:
    """Decode JSON in UTF-8, with or without a byte-order mark.

    Raises:
        ValueError: it is not UTF-8 or not JSON; the message starts with `name`.
    """
    text = decode_text(content, name)
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{name} is not JSON ({error}).") from None


def decode_text(content: bytes, name: str) -> str:
    """Decode UTF-8, without byte-order marks and with all line ends as line feeds.

    Raises:
        ValueError: it is not UTF-8; the message starts with `name`.
    """
    if content.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise ValueError(f"{name} is not UTF-8 text but UTF-16; save it as UTF-8.")
    index, reason = content.find(b"\0"), "a zero byte, as in UTF-16"
    try:
        text = content.decode()
    except UnicodeDecodeError as error:
        index, reason = error.start, error.reason
    if index >= 0:
        line = content.count(b"\n", 0, index) + 1
        raise ValueError(f"{name} is not UTF-8 text (line {line}: {reason}); save it as UTF-8.")
    return MARK.sub("", text).replace("\r\n", "\n").replace("\r", "\n")


def checked_caption(value: Any, name: str) -> str:
    """Return a caption read from JSON.

    Raises:
        ValueError: it is not text, or has a lone surrogate; the message starts with `name`.
    """
    if not isinstance(value, str):
        raise ValueError(f"{name} must be text, but is {_kind(value)}.")
    return check_text(name, value)  # JSON can escape half of a surrogate pair


def _kind(value: Any) -> str:
    """Name a value's type in JSON terms."""
    for kind, name in ((dict, "an object"), (list, "a list"), (str, "a string")):
        if isinstance(value, kind):
            return name
    return json.dumps(value)
