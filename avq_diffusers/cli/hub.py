"""Whether a model or codebooks can be found, before a library tries for half a minute."""

from pathlib import Path

TIMEOUT = 5  # seconds


def check_found(option: str, name: str, file: str) -> None:
    """Refuse a name that is no path, not in the cache and cannot be found on the Hub.

    `file` is one that the repository holds; errors name `option`.
    """
    if not name:
        raise ValueError(f"{option} is empty; name a folder or a Hub id.")
    if Path(name).is_file() or Path(name).is_dir():
        return
    from huggingface_hub import HfApi, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    try:
        if isinstance(try_to_load_from_cache(name, file), str):
            return
        HfApi().model_info(name, timeout=TIMEOUT)
    except GatedRepoError:
        return
    except HFValidationError as error:
        raise ValueError(f"{option} {name} is no file or folder, and no Hub id.") from error
    except RepositoryNotFoundError as error:
        raise ValueError(f"{option} {name} is no file or folder, and not on the Hub.") from error
    except Exception as error:  # of an HTTP library that depends on the Hub client's version
        raise ValueError(
            f"{option} {name} is no file or folder and not in the cache, and the Hub cannot be "
            f"reached."
        ) from error
