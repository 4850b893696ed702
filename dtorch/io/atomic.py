"""Files and folders that are replaced all at once: written beside, brought to the disk, and only then given the name."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import itertools
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path

_count = itertools.count()

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2


@contextlib.contextmanager
def replacing_file(path: str | os.PathLike[str]) -> Iterator[Path]:
    """A file to write, which takes the place of ``path`` when the block ends without an error."""
    target = Path(os.path.realpath(path))
    with _partial(target) as partial:
        yield partial
        _to_disk(partial)
        os.replace(partial, target)
        _to_disk(target.parent)


@contextlib.contextmanager
def replacing_folder(path: str | os.PathLike[str], replaced: Callable[[str], bool]) -> Iterator[Path]:
    """A folder to write, which takes the place of ``path`` when the block ends without an error.

    Where the filesystem cannot exchange two folders, ``path`` is absent for a moment.

    Args:
        replaced: whether a file of this name that ``path`` holds now belongs to what is replaced. All others are kept.

    Raises:
        ValueError: the working directory is ``path``, or in it: it would be gone.
    """
    target = Path(os.path.realpath(path))
    if _working_directory().is_relative_to(target):
        raise ValueError(
            f"{target} is the working directory or holds it, and a folder that is written to is replaced; name a folder in it"
        )
    if target.exists() and not target.is_dir():
        raise NotADirectoryError(f"{target} is a file; a folder is to be written there")
    with _partial(target) as partial:
        partial.mkdir()
        yield partial
        for written in partial.iterdir():
            _to_disk(written)
        if target.exists():
            _keep(target, partial, replaced)
        for folder, _, _ in os.walk(partial, topdown=False):
            _to_disk(Path(folder))
        if target.exists():
            _exchange(partial, target)
        else:
            os.rename(partial, target)
        _to_disk(target.parent)


@contextlib.contextmanager
def _partial(target: Path) -> Iterator[Path]:
    """A path beside ``target`` that is free; whatever is there in the end is removed."""
    target.parent.mkdir(parents=True, exist_ok=True)
    _remove_leftovers(target)
    partial = target.parent / f".{target.name}.{socket.gethostname()}-{os.getpid()}-{next(_count)}.partial"
    try:
        yield partial
    finally:
        _remove(partial)


def _remove_leftovers(target: Path) -> None:
    """What processes of this host that died while they wrote ``target`` have left."""
    prefix = f".{target.name}.{socket.gethostname()}-"
    for found in target.parent.iterdir():
        if found.name.startswith(prefix) and found.name.endswith(".partial"):
            number = found.name[len(prefix) :].partition("-")[0]
            if number.isdigit() and not os.path.exists(f"/proc/{number}"):
                _remove(found)


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def _keep(source: Path, target: Path, replaced: Callable[[str], bool]) -> None:
    """The files of ``source`` that stay, in ``target`` too."""

    def link(there: str, here: str) -> None:
        try:
            os.link(there, here, follow_symlinks=False)
        except OSError:
            shutil.copy2(there, here, follow_symlinks=False)
            if not os.path.islink(here):
                _to_disk(Path(here))

    for found in source.iterdir():
        here = target / found.name
        if found.is_dir() and not found.is_symlink():
            shutil.copytree(found, here, symlinks=True, copy_function=link)
        elif not replaced(found.name) and not here.exists():
            link(str(found), str(here))
    shutil.copystat(source, target)


def _exchange(new: Path, old: Path) -> None:
    """Give each of two folders the name of the other."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(_AT_FDCWD, os.fsencode(new), _AT_FDCWD, os.fsencode(old), _RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS, errno.EXDEV, errno.ENOTSUP):
        raise OSError(number, os.strerror(number), str(old))
    aside = new.with_name(f"{new.name}.old")
    os.rename(old, aside)
    os.rename(new, old)
    _remove(aside)


def _working_directory() -> Path:
    """An empty path if it is gone."""
    try:
        return Path.cwd()
    except FileNotFoundError:
        return Path()


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
