"""What the programs share before they run: options, files of prompts and captions."""

import codecs
import json
import logging
import os
import sys
from importlib import import_module
from io import BytesIO, TextIOWrapper
from pathlib import Path
from types import SimpleNamespace

import pytest

from avq_diffusers.captions import read_caption_list, read_json
from avq_diffusers.options import (
    folder_to_write,
    hide_torchvision_notes,
    not_empty,
    numbers_of,
    read_prompts,
    restore_threads,
    tolerances_of,
)


def test_only_notes_of_torchvision_are_hidden(monkeypatch):
    logger, seen = logging.getLogger("transformers.utils.import_utils"), []
    monkeypatch.setattr(logger, "filters", [])
    monkeypatch.setattr(logger, "callHandlers", lambda record: seen.append(record.getMessage()))
    hide_torchvision_notes()
    for message in ("`CLIPImageProcessor` requires torchvision (not installed)", "another note"):
        logger.error(message)
    assert seen == ["another note"]


@pytest.mark.parametrize("launched", [True, False])
def test_accelerates_single_thread_is_not_kept(monkeypatch, launched):
    """Catches a single process on one of many cores, and a user's own number that is lost."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv("LOCAL_WORLD_SIZE", raising=False)
    monkeypatch.delenv("ACCELERATE_DYNAMO_BACKEND", raising=False)
    if launched:
        monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")
    restore_threads()
    assert ("OMP_NUM_THREADS" in os.environ) != launched


@pytest.mark.skipif(not Path("/proc").is_dir(), reason="needs a folder that root cannot write in")
def test_a_read_only_folder_is_refused():
    """Catches minutes of work that end in nothing, also root's, which may write by the mode."""
    with pytest.raises(ValueError, match="--output: the folder /proc is not writable"):
        folder_to_write(SimpleNamespace(opts=["--output"]), Path("/proc/new/codebooks"))


def test_prompts_are_text():
    """Bytes that are not UTF-8 arrive from the shell as lone surrogates."""
    for prompt, message in (
        ("a fox\udcff", r"must be text, but its character 6 is a lone surrogate, '\\udcff'\."),
        (" ", r"is empty; say what the image shows\."),
    ):
        with pytest.raises(ValueError, match=f"^the prompt {message}$"):
            not_empty(prompt)


@pytest.mark.parametrize("program", ["avq_diffusers.cli.main", "eval.__main__"])
def test_text_that_stdout_cannot_encode_is_printed(monkeypatch, program):
    """Catches finished work that ends in exit code 2 because the prompt has a star."""
    written = BytesIO()
    monkeypatch.setattr(sys, "stdout", TextIOWrapper(written, encoding="ascii"))
    monkeypatch.setattr(sys, "argv", ["program", "--help"])
    with pytest.raises(SystemExit):
        import_module(program).main()
    print("a \N{BLACK STAR}", flush=True)
    assert written.getvalue().endswith(b"a \\u2605\n")


def test_prompts_that_cannot_be_read(tmp_path):
    with pytest.raises(ValueError, match=r"--prompts .* cannot be read"):
        read_prompts("--prompts", tmp_path)


@pytest.mark.parametrize("text", ["\u0663", "1,\u0663", 5000 * "9"])
def test_numbers_are_ascii_and_short(text):
    assert numbers_of("--levels", "0, 12") == (0, 12)
    with pytest.raises(ValueError, match="--levels must be numbers such as 0 or 0,1"):
        numbers_of("--levels", text)


def test_tolerances():
    assert tolerances_of("--tolerances", "0.05,0.5") == (0.05, 0.5)
    for text, message in (
        ("0.1,", "--tolerances must be numbers such as 0.1 or 0.05,0.1, but got '0.1,'"),
        ("0.1,-1", "--tolerances must be above 0 and at most 0.5, but got -1.0"),
        ("nan", "--tolerances must be above 0 and at most 0.5, but got nan"),
        ("0.1,2", "--tolerances must be above 0 and at most 0.5, but got 2.0; 0.02 is 2 %."),
    ):
        with pytest.raises(ValueError, match=message):
            tolerances_of("--tolerances", text)


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
