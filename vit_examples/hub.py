"""Data sets of the Hugging Face hub, by name; nothing that comes with one is run."""

from __future__ import annotations

import os
import socket
import sys
import threading
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

#: Seconds for the hub to take a connection; where it takes none, `datasets` would try again for half a minute.
ANSWER_S = 3.0
#: Readers of files that come with `datasets` 5.0; a newer one may have more.
# fmt: off
FILE_FORMATS = (
    "arrow", "audiofolder", "cache", "conll", "csv", "eval", "folder_based_builder", "generator", "hdf5", "iceberg",
    "imagefolder", "json", "lance", "meshfolder", "niftifolder", "pandas", "parquet", "pdffolder", "spark", "sql",
    "text", "tsfile", "videofolder", "webdataset", "xml",
)
# fmt: on


def load(name: str) -> Any:
    """All splits of a data set, from the hub or, where that does not answer, from what was loaded before.

    Raises:
        ValueError: if it cannot be loaded, saying what was tried.
    """
    import datasets

    tried = f"data.source={name!r}: no folder {str(Path(name).absolute())!r}"
    readers = getattr(datasets.packaged_modules, "_PACKAGED_DATASETS_MODULES", ())  # no public name
    # They read whatever lies in the current folder, and `pandas` runs what is in its pickles.
    if name in FILE_FORMATS or name in readers:
        raise ValueError(f"{tried}, and {name!r} is a file format of `datasets`, not a data set of the hub")
    hub = datasets.config.HF_ENDPOINT
    if os.environ.get("RANK", "0") == "0":
        sys.stdout.write(f"data: no folder {name!r} here; looking for it on {hub}\n")  # whole: ranks share it
        sys.stdout.flush()
    reason = ""
    if datasets.config.HF_HUB_OFFLINE:
        reason = " (offline: HF_HUB_OFFLINE or HF_DATASETS_OFFLINE is set)"
    elif not answers(hub):
        reason = f" ({hub} does not answer)"
        _go_offline(datasets)
    is_scripted = int(datasets.__version__.split(".")[0]) < 4  # since then there are no loading scripts
    try:
        return datasets.load_dataset(name, **({"trust_remote_code": False} if is_scripted else {}))
    except Exception as error:  # datasets raises errors of many kinds, from connection to format
        raise ValueError(
            f"{tried}, and no data set of that name can be loaded from the Hugging Face hub{reason}: {error}"
        ) from error


def download_folder(cell: Any) -> Path:
    """The folder of downloads that the picture of a cell is in, if it is a file and in one at all."""
    import datasets
    from huggingface_hub import constants

    folders = [
        Path(datasets.config.HF_CACHE_HOME),
        Path(datasets.config.HF_DATASETS_CACHE),
        Path(constants.HF_HUB_CACHE),
    ]
    path = cell.get("path") if isinstance(cell, dict) else None
    return next((folder for folder in folders if path and Path(path).is_relative_to(folder)), folders[0])


def answers(url: str) -> bool:
    """Whether a server, or the proxy on the way to it, takes a connection within ``ANSWER_S`` seconds."""
    scheme = urllib.parse.urlsplit(url).scheme
    proxy = urllib.request.getproxies().get(scheme)
    target = urllib.parse.urlsplit(proxy if proxy else url)
    port = target.port or (443 if target.scheme == "https" else 80)
    answered = threading.Event()

    def connect() -> None:
        try:
            socket.create_connection((target.hostname or "", port), ANSWER_S).close()
        except OSError:
            return
        answered.set()

    attempt = threading.Thread(target=connect, daemon=True)  # looking up a name has no time limit of its own
    attempt.start()
    attempt.join(ANSWER_S)
    return answered.is_set()


def _go_offline(datasets: Any) -> None:
    """What HF_HUB_OFFLINE=1 does where it is set before the libraries are imported."""
    from huggingface_hub import constants

    constants.HF_HUB_OFFLINE = True
    datasets.config.HF_HUB_OFFLINE = datasets.config.HF_DATASETS_OFFLINE = True
