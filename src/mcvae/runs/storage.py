"""Run folders at a path or a URL, and their locks. Of a folder at a URL a local copy is used, and copied back."""

import atexit
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Literal

from filelock import FileLock, Timeout

from mcvae.runs.plain import RunError

__all__ = ["RunFolder", "check_links", "held", "hold", "lock_of", "top_level"]


def check_links(folder: Path) -> None:
    """Raise a RunError if a run folder holds links: writing through a link could destroy files elsewhere."""
    for path in folder.rglob("*"):
        if path.is_symlink():
            raise RunError(
                f"{path} is a link, and run folders with links are not written to. Put the file itself there."
            )


Work = Literal["training", "evaluating"]
"""What a process may lock a run folder for. One may train while another evaluates."""


def lock_of(folder: Path, work: str) -> FileLock:
    """The lock for one kind of work in a folder. The system releases it when the process ends, however it ends."""
    path = folder / f".{work}.lock"
    if path.is_symlink():  # locking would empty the file that it leads to
        raise RunError(f"{path} is a link. Remove it.")
    return FileLock(path, timeout=0, is_singleton=False)


@contextmanager
def hold(folder: Path, work: Work, place: str) -> Iterator[None]:
    """Hold the folder's lock for this work. Raise a RunError if another process has it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = lock_of(folder, work)
        lock.acquire()
    except Timeout:
        raise RunError(
            f"another process is {work} {place}. Wait until it has ended, or choose another folder."
        ) from None
    except OSError as error:
        raise RunError(f"{place} cannot be written to: {error.strerror}. Choose another folder.") from None
    try:
        yield
    finally:
        lock.release()


def held(folder: Path, work: str) -> bool:
    """Whether a process holds the folder's lock for this work."""
    if not (folder / f".{work}.lock").exists():
        return False
    try:
        with lock_of(folder, work):
            return False
    except Timeout:
        return True
    except (OSError, RunError):  # a folder that cannot be written to, or a link
        return False


def top_level(name: str) -> bool:
    """Whether a file lies directly in the run folder: results and weights, but no checkpoints, pictures or logs."""
    return "/" not in name


class RunFolder:
    """A local view of a run folder.

    A path is used as it is, `file://` included. Any other URL that fsspec knows (s3://, gs://, sftp://, memory://) is
    copied to a temporary folder; `push` copies back what has changed since.

    Args:
        place: path or URL.
        wanted: which files to fetch, by their names below the folder; all by default.

    >>> RunFolder("runs/digits-vae-s0").path
    PosixPath('runs/digits-vae-s0')
    """

    def __init__(self, place: str | Path, wanted: Callable[[str], bool] = lambda name: True):
        self.place, self.path = str(place), Path(place)
        self._system = None
        if "://" not in self.place:
            return
        import fsspec  # type: ignore[import-untyped]
        from fsspec.implementations.local import LocalFileSystem  # type: ignore[import-untyped]

        try:
            system, root = fsspec.core.url_to_fs(self.place)
        except (ImportError, ValueError) as error:
            raise RunError(f"{self.place} cannot be used: {error}.") from None
        if isinstance(system, LocalFileSystem):
            self.path = Path(root)
            return
        self._system, self._root = system, root.rstrip("/")
        self.path = Path(tempfile.mkdtemp(prefix="mcvae-"))
        self._unsaved = False
        atexit.register(self._remove)
        self._fetch(wanted)

    def _fetch(self, wanted: Callable[[str], bool]) -> None:
        assert self._system is not None
        try:
            for found in self._system.find(self._root):
                name = found.removeprefix(self._root).lstrip("/")
                if ".." in PurePosixPath(name).parts:
                    raise RunError(f"{self.place} holds a file whose name leads out of the folder: {name}.")
                if wanted(name):
                    (self.path / name).parent.mkdir(parents=True, exist_ok=True)
                    self._system.get_file(found, str(self.path / name))
        except RunError:
            raise
        except Exception as error:  # every kind of storage has exceptions of its own
            raise RunError(f"{self.place} cannot be read: {error}.") from error
        self._known = self._files()

    def _files(self) -> dict[str, tuple[int, int]]:
        """Time and size of every file, oldest first; without hidden ones, which are still being written."""
        found = [path for path in self.path.rglob("*") if path.is_file() and not path.name.startswith(".")]
        stats = {path.relative_to(self.path).as_posix(): path.stat() for path in found}
        return {name: (s.st_mtime_ns, s.st_size) for name, s in sorted(stats.items(), key=lambda s: s[1].st_mtime_ns)}

    def push(self) -> None:
        """Copy changed files to the URL, oldest first: at any time, a sound checkpoint is there."""
        if self._system is None:
            return
        self._unsaved = True
        try:
            for name, stat in self._files().items():
                if self._known.get(name) != stat:
                    target = f"{self._root}/{name}"
                    self._system.makedirs(target.rpartition("/")[0], exist_ok=True)
                    self._system.put_file(str(self.path / name), target)
                    self._known[name] = stat
            for name in self._known.keys() - self._files().keys():
                self._system.rm_file(f"{self._root}/{name}")
                del self._known[name]
        except Exception as error:
            raise RunError(
                f"{self.path} could not be copied to {self.place}: {error}. Nothing is lost: it stays until you have "
                "copied or removed it."
            ) from error
        self._unsaved = False

    def _remove(self) -> None:
        if not self._unsaved:
            shutil.rmtree(self.path, ignore_errors=True)
