"""Images and captions: sources, encoding, cache and batches."""


class DataError(ValueError):
    """The data of a run cannot be read; the message names the sample or file."""
