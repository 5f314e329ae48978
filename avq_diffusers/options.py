"""What the values of options stand for, in the commands of this repository."""


def numbers_of(option: str, text: str) -> tuple[int, ...]:
    """The integers of a comma-separated list; `option` is named where it is none."""
    try:
        return tuple(int(number) for number in text.split(","))
    except ValueError:
        raise ValueError(f"{option} must be numbers such as 0 or 0,1, but got {text!r}.") from None
