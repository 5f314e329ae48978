"""Files of captions and prompts: every command reads them alike."""

import codecs
import json

import pytest

from avq_diffusers.captions import read_caption_list, read_json
from avq_diffusers.options import read_prompts

LAKE, HILL = "ein grüner See", "a hill\u2028at night"
MARK = "\ufeff"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("prompts.txt", f"{LAKE}\n{HILL}\n"),
        ("prompts.txt", f"{MARK}{LAKE}\n{HILL}"),
        ("prompts.txt", f"{MARK}{LAKE}\n{MARK}{HILL}\n"),  # two files, concatenated
        ("prompts.txt", f"{MARK}  {LAKE} \r\n{HILL}\r\n"),
        ("prompts.md", f"{LAKE}\r{HILL}\r"),
        ("prompts.json", json.dumps([LAKE, HILL])),
        ("prompts.JSON", MARK + json.dumps([LAKE, f" {HILL} "], ensure_ascii=False, indent=1)),
    ],
)
def test_a_file_holds_its_captions_and_nothing_else(tmp_path, name, content):
    """Catches marks and blanks in captions, JSON taken for lines, and lines cut at U+2028."""
    path = tmp_path / name
    path.write_bytes(content.encode())
    assert read_caption_list(path) == [LAKE, HILL]
    assert read_prompts("--prompts", path) == [LAKE, HILL]


def test_empty_lines_are_empty_captions_and_no_prompts(tmp_path):
    path = tmp_path / "prompts.txt"
    path.write_text(f"{MARK}\n a \n\nb\n", encoding="utf-8")
    assert read_caption_list(path) == ["", "a", "", "b"]
    assert read_prompts("--prompts", path) == ["a", "b"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", codecs.BOM_UTF16_BE + "a".encode("utf-16-be"), "is not UTF-8 text but UTF-16; "),
        ("a.txt", "a".encode("utf-16"), "is not UTF-8 text but UTF-16; save it as UTF-8"),
        ("a.txt", "a\nb".encode("utf-16-be"), r"is not UTF-8 text \(line 1: a zero byte"),
        ("a.json", '["a"]'.encode("utf-16-le"), r"is not UTF-8 text \(line 1: a zero byte"),
        ("a.txt", "a\nb\nü".encode("latin-1"), r"is not UTF-8 text \(line 3: invalid start byte"),
        ("a.JSON", b'["a",\n"b",', r"is not JSON \(.*line 2 column 5"),
        ("a.json", b"[" * 100_000, r"is not JSON \("),
        ("a.json", b'{"a": "b"}', "must hold a JSON list of strings, but holds an object"),
        ("a.json", b'"a"', "must hold a JSON list of strings, but holds a string"),
        ("a.json", b'["a", null, 3]', r"caption 2 of .*a\.json must be text, but is null"),
        ("a.json", b'["a", ["b", "c"]]', r"caption 2 of .*a\.json must be text, but is a list"),
        (
            "a.json",
            rb'["a", "\ud800"]',
            r"caption 2 of .*a\.json must be text, but its character 1 is a lone surrogate",
        ),
        ("a.jsonl", b'{"caption": "a"}', r"a\.jsonl is a table; write its captions to a \.txt"),
        ("a.CSV", b"file_name,caption", r"a\.CSV is a table"),
    ],
)
def test_other_files_are_refused_by_line_or_entry(tmp_path, name, content, message):
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(ValueError, match=message):
        read_caption_list(path)
    with pytest.raises(ValueError, match=f"^--prompts: .*{message}"):
        read_prompts("--prompts", path)


def test_json_may_begin_with_a_byte_order_mark(tmp_path):
    path = tmp_path / "annotations.json"
    path.write_text('{"annotations": []}', encoding="utf-8-sig")
    assert read_json(path) == {"annotations": []}
