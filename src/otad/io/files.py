"""Files that are either complete or absent."""

from __future__ import annotations

import glob
import os
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, TypeVar

from filelock import FileLock, Timeout

from otad.checks import require
from otad.errors import InputError

Read = TypeVar("Read")


def most_unpacked(path: Path) -> int:
    """Return how many bytes a compressed file may unpack to. A file that needs more is an attack on
    memory."""
    return max(2**30, 100 * path.stat().st_size)


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """The name of a new file beside `path`, which replaces it when the block ends without error.

    A kill at any moment leaves what was at `path` before, or the whole new file; of two writers at
    once the last one wins. What a killed writer left behind is removed by the next one. Links are
    followed, the mode of the old file is kept, and what is not a regular file is refused.
    """
    old = path.stat() if path.exists() else None
    found = "a folder" if path.is_dir() else "a device, a pipe or a socket"
    require(old is None or stat.S_ISREG(old.st_mode), str(path), "a regular file or none", found)
    path = Path(os.path.realpath(path))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(path)
        partial, guard = _new_partial(path)
    except OSError as error:  # which may name the hidden file
        raise InputError(f"{path}: expected a place for a file, got: {error.strerror}") from error
    try:
        yield partial
        if old is not None:
            partial.chmod(stat.S_IMODE(old.st_mode))
        _flush(partial)
        if sys.platform == "win32":  # where an open file cannot be renamed
            guard.close()
        os.replace(partial, path)
    except OSError as error:
        error.filename = error.filename or str(path)  # a full disk does not name the file
        raise
    finally:
        guard.close()
        partial.unlink(missing_ok=True)
    if os.name == "posix":  # elsewhere a folder cannot be opened
        _flush(path.parent)


@contextmanager
def locked(path: Path, *, wait: bool = True) -> Iterator[bool]:
    """Hold the lock of a file until the block or the process ends, and yield whether it is held.

    While another process holds it, wait, or else yield False."""
    lock = FileLock(path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=-1 if wait else 0)
    except Timeout:
        pass
    except OSError as error:
        expected = f"a folder in which {path.name} can be written"
        raise InputError(f"{path.parent}: expected {expected}, got: {error.strerror}") from error
    try:
        yield lock.is_locked
    finally:
        lock.release()


def _new_partial(path: Path) -> tuple[Path, BinaryIO]:
    """A new empty file, and its open handle, which shows others that its writer is alive."""
    while True:
        partial = path.with_name(f".{path.name}.{secrets.token_hex(8)}.partial")
        guard = partial.open("xb")
        # Else it was removed before it was locked.
        if _lock(guard) and (sys.platform == "win32" or os.fstat(guard.fileno()).st_nlink > 0):
            return partial, guard
        guard.close()


def _remove_abandoned(path: Path) -> None:
    for leftover in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with suppress(OSError):  # another writer removed it, or on Windows still has it open
            with leftover.open("rb") as file:
                abandoned = _lock(file)
                if abandoned and sys.platform != "win32":
                    leftover.unlink()  # before its writer, if it has just begun, can lock it
            if abandoned and sys.platform == "win32":  # where an open file cannot be removed
                leftover.unlink()


def _lock(file: BinaryIO) -> bool:
    """Return whether no other process holds this file."""
    if sys.platform != "win32":
        import fcntl

        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def read_settled(path: Path, read: Callable[[], Read]) -> Read:
    """Return what `read` makes of a file that it opens several times, such as to verify and to map
    it. If the file, or one in this folder, is replaced meanwhile, it is read again."""
    while True:
        before, found = _states(path), read()
        if _states(path) == before:
            return found


def _states(path: Path) -> list[tuple[int, ...]]:
    files = filter(Path.is_file, sorted(path.glob("[!.]*"))) if path.is_dir() else [path]
    found = (file.stat() for file in files)
    return [(one.st_dev, one.st_ino, one.st_size, one.st_mtime_ns) for one in found]


def is_inside(path: Path, folder: Path) -> bool:
    """Return whether a path is in the folder itself, and no link to another place.

    The cache of the Hugging Face Hub links the files in `snapshots` to the `blobs` beside it."""
    home = folder.resolve()
    blobs = (parent.parent / "blobs" for parent in home.parents if parent.name == "snapshots")
    return path.resolve().parent in (home, *blobs)
