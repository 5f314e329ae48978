"""The exceptions that end a command with one sentence."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager

import typer


class DataError(ValueError):
    """The data of a run cannot be read; the message names the sample or file."""


@contextmanager
def exit_on(*kinds: type[Exception], code: int) -> Iterator[None]:
    """Print the message of such an exception and exit with this code."""
    try:
        yield
    except kinds as error:
        print(f"error: {error}", file=sys.stderr)
        raise typer.Exit(code) from error
