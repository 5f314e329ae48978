"""Errors that the commands report in one sentence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class DataError(ValueError):
    """Samples that a run cannot do without cannot be read; the message says which."""


@contextmanager
def one_sentence(*kinds: type[Exception], code: int) -> Iterator[None]:
    """End the command with the message of such an error and this exit code."""
    try:
        yield
    except kinds as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from error
