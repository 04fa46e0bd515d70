"""Ask the Hugging Face hub whether it gives a model or a data set; a sentence says why it does not.

The libraries themselves ask six times, with a warning each, for half a minute: here one request
decides whether they may ask, or are to look into their cache alone.
"""

import os
from collections.abc import Iterable
from pathlib import Path

from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    FileMetadataError,
    GatedRepoError,
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RepositoryNotFoundError,
)

from .arguments import did_you_mean

SECONDS = 5.0  # limit of the request, unless HF_HUB_ETAG_TIMEOUT is set
FILES = {"model": "config.json", "dataset": "README.md"}  # what is asked for
PLACE = {"model": "directory", "dataset": "file"}
INSTEAD = {
    "model": "a directory with its files",
    "dataset": "a CSV, TSV, JSONL or Parquet file, or docstrings",
}


def refusal(kind: str, name: str) -> Exception | None:
    """Return what keeps the hub from giving the `kind`, model or dataset, of this name, or None.

    It is one of huggingface_hub's errors if the hub says no, or if no hub may be asked, and
    whatever the connection raises if none answers. A hub that is too busy refuses nothing: the
    libraries wait for it.
    """
    limit = SECONDS
    if "HF_HUB_ETAG_TIMEOUT" in os.environ:
        limit = constants.HF_HUB_ETAG_TIMEOUT
    try:
        get_hf_file_metadata(hf_hub_url(name, FILES[kind], repo_type=kind), timeout=limit)
    except HfHubHTTPError as error:
        return error if _is_unknown(error) or _is_closed(error) else None
    except FileMetadataError:  # it has the file
        return None
    except Exception as error:  # a connection's, of types that change with the library
        return error
    return None


def _is_closed(error: Exception) -> bool:
    """Tell whether a licence or a token may be missing."""
    if isinstance(error, GatedRepoError):
        return True
    return isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403)


def _is_unknown(error: Exception) -> bool:
    """Tell whether the hub knows no such name; to strangers it says so of what is private, too."""
    return isinstance(error, RepositoryNotFoundError) and not isinstance(error, GatedRepoError)


def explain(what: str, kind: str, name: str, error: Exception, known: Iterable[str]) -> str:
    """Return a sentence: why there is no `what`, which names the `kind` and its name, and what
    would work. A name that is near is one of `known`, or one on this disk."""
    if not _is_unknown(error):  # gpt2 is another name of openai-community/gpt2
        known = [other for other in known if other.rpartition("/")[2] != name]
    hint = did_you_mean(name, [*known, *beside(kind, name), *_cached(kind)])
    absent = f"{what}{hint} is no {PLACE[kind]} here"
    instead = INSTEAD[kind]
    if _is_unknown(error):
        return (
            f"{absent}, and the hub has no public {kind} of that name: give one that "
            f"it has, set HF_TOKEN for a private one, or give {instead}"
        )
    if _is_closed(error):
        folder = "datasets/" if kind == "dataset" else ""
        page = f"{constants.ENDPOINT}/{folder}{name}"
        return (
            f"the hub does not give {what} to this account ({error.response.status_code}): accept "
            f"its licence on {page} and set HF_TOKEN to a token of the account that did, or give "
            f"{instead}"
        )
    if isinstance(error, ValueError):  # HFValidationError
        return f"{absent}, and cannot be a name on the hub: give {instead}"
    cache = "set HF_HOME to a cache that has it"
    if isinstance(error, OfflineModeIsEnabled):
        return (
            f"{absent} and not whole in the cache, and HF_HUB_OFFLINE keeps from "
            f"asking the hub: unset it, give {instead}, or {cache}"
        )
    reason = type(error).__name__
    if "Timeout" in reason:
        reason += ", HF_HUB_ETAG_TIMEOUT=60 waits longer"
    return (
        f"{absent} and not whole in the cache, and {constants.ENDPOINT} cannot be "
        f"reached ({reason}): give {instead}, or {cache}, with "
        "HF_HUB_OFFLINE=1 where there is no network"
    )


def beside(kind: str, name: str) -> list[str]:
    """Return the paths beside where `name` would be; of a model's only directories."""
    folder = Path(name).expanduser().parent
    if not folder.is_dir():
        return []
    there = [path for path in folder.iterdir() if not path.name.startswith(".")]
    return [str(path) for path in there if kind == "dataset" or path.is_dir()]


def _cached(kind: str) -> list[str]:
    """Return the names in the cache of the hub's files."""
    folders = Path(constants.HF_HUB_CACHE).glob(f"{kind}s--*")
    return [folder.name.split("--", 1)[1].replace("--", "/") for folder in folders]
