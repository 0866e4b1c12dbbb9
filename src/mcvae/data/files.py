"""Files of a data set: found in place, or downloaded, checked and unpacked."""

import hashlib
import os
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

from mcvae.data.splits import DataError

__all__ = ["check_md5", "fetch", "fetch_folder"]


def fetch(path: Path, url: str, md5: str, download: bool) -> Path:
    """The file `path`, downloaded from `url` if it does not exist; its checksum is verified in either case.

    Args:
        path: where the file is, or where the download goes, under this name only when it is complete and verified.
        url: where it comes from.
        md5: its checksum.
        download: False to use only files that exist already.
    """
    if path.is_file():
        check_md5(path, md5)
        return path
    by_hand = (
        f"Download it manually from {url} (md5 {md5}) to {path}; or name the folder that has it with the environment "
        "variable MCVAE_DATA, root=... in Python, or --data.root."
    )
    if not download:
        raise DataError(f"expected the file {path}, which does not exist, and download is off. {by_hand}")
    import pooch

    try:
        pooch.retrieve(url, f"md5:{md5}", fname=path.name, path=path.parent, progressbar=sys.stderr.isatty())
    except (OSError, ValueError) as error:  # no network, no such page, no space; or another checksum than expected
        raise DataError(f"could not download {path}: {error}. {by_hand}") from error
    return path


def fetch_folder(folder: Path, url: str, md5: str, download: bool) -> Path:
    """The folder `folder`, unpacked from the archive at `url` if it does not exist.

    It gets its name only when it is complete, so that an interruption leaves no partial folder.
    """
    if folder.is_dir():
        return folder
    archive = fetch(folder.parent / url.rsplit("/", 1)[-1], url, md5, download)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=f".{folder.name}-") as scratch:
        try:
            _unpack(archive, Path(scratch))
            os.rename(Path(scratch) / folder.name, folder)
        except (OSError, tarfile.TarError, zipfile.BadZipFile, EOFError) as error:
            if not folder.is_dir():  # otherwise another process has unpacked it
                raise DataError(
                    f"expected {archive} to be an archive that holds the folder {folder.name}, but it cannot be "
                    f"unpacked: {error}. Delete it and run again, or unpack it manually to {folder}."
                ) from error
    return folder


def _unpack(archive: Path, into: Path) -> None:
    """Unpack a .zip or .tar.gz; no member may leave the folder `into`, whatever its name says."""
    if archive.suffix == ".zip":
        with zipfile.ZipFile(archive) as zipped:
            zipped.extractall(into)  # drops "..", drives and leading slashes from names
    else:
        with tarfile.open(archive) as tar:
            tar.extractall(into, filter="data")


def check_md5(path: Path, md5: str) -> None:
    """Raise a DataError unless the file has this checksum."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()
    if found != md5:
        raise DataError(
            f"{path} is damaged or not the expected file: expected md5 {md5}, got {found}. Delete it and run again to "
            "download it, or replace it with the right file."
        )
