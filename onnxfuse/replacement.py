"""Files that take the place of others: written beside them and renamed, so that whatever happens, the old file or the
new one is there. Paths that are links are written through: the file that they stand for is replaced."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

from onnxfuse.errors import OutputError

try:
    import fcntl
except ImportError:  # Windows, where a file that is open cannot be removed
    fcntl = None  # type: ignore[assignment]

_MARK = "onnxfuse-"


def real_path(path: Path) -> Path:
    """The file that a path stands for: what it links to, or itself.

    Raises:
        OutputError: it is a link to nothing.
    """
    if not path.is_symlink():
        return path
    if not path.exists():
        raise OutputError(
            f"`{path}` is a link to `{os.readlink(path)}`, which does not exist",
            hint="remove the link, or name the file itself",
        )
    return path.resolve()


def data_of(model: Path) -> Path:
    """The file beside a model that holds its big tensors, if they are kept outside."""
    target = model.resolve() if model.is_symlink() else model
    return target.with_name(target.name + ".data")


class Beside:
    """A temporary file that may take the place of `target`. It is locked while this process needs it, which tells it
    from one that a killed process left behind.

    Args:
        target: the file (no link), in whose folder it lies.
        name: by which `remove_stale` finds it; that of the target, if it is not given.
        suffix: of the temporary file's name.
    """

    def __init__(self, target: Path, name: str | None = None, suffix: str = "") -> None:
        mask = os.umask(0)
        os.umask(mask)
        while True:
            self._descriptor, made = tempfile.mkstemp(
                dir=target.parent, prefix=f".{name or target.name}.{_MARK}", suffix=suffix
            )
            self.path = Path(made)
            _lock(self._descriptor)
            if os.fstat(self._descriptor).st_nlink:  # else another process took it for stale before it was locked
                break
            os.close(self._descriptor)
        os.chmod(self.path, 0o666 & ~mask)

    def fill(self, content: bytes) -> None:
        with open(self.path, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())

    def release(self) -> None:
        """From here on the file, if it is still there, is stale unless something refers to it."""
        os.close(self._descriptor)


def remove_stale(target: Path, name: str | None = None, used: Callable[[], Collection[str]] = tuple) -> None:
    """Remove what killed or failed writers of `target` left beside it.

    Args:
        name: that was given to `Beside`.
        used: the names of files that must stay; asked only if there is something to remove.
    """
    pattern = re.compile(re.escape(f".{name or target.name}.{_MARK}") + r"\w{8}(\.\w+)?")
    try:
        found = [entry for entry in target.parent.iterdir() if pattern.fullmatch(entry.name)]
    except OSError:  # a folder that may be written to and not be read
        return
    keep = set(used()) if found else set()
    for entry in found:
        if entry.name not in keep:
            with contextlib.suppress(OSError):  # held by another, or there are no locks here: rather keep it
                _remove_unless_held(entry)


@contextlib.contextmanager
def replaced(path: Path) -> Iterator[Path]:
    """A temporary file to write to; it takes the place of `path` at the end, if there is no error.

    Raises:
        OutputError: it cannot be written, or `path` is a link to nothing.
    """
    target = real_path(path)
    beside = None
    try:
        beside = Beside(target)
        yield beside.path
        os.replace(beside.path, target)
    except OSError as error:
        raise OutputError(f"cannot write `{path}`: {error.strerror or error}", hint="check the folder") from error
    finally:
        if beside is not None:
            beside.release()
            remove_stale(target)


def write_text(path: Path, text: str) -> None:
    """Write a text file.

    Raises:
        OutputError: it cannot be written.
    """
    with replaced(path) as temporary:
        temporary.write_text(text, encoding="utf-8")


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Other processes that replace several files of the folder wait, where the system can make them."""
    with contextlib.ExitStack() as held:
        if fcntl is not None:
            with contextlib.suppress(OSError):  # some network file systems have no locks
                descriptor = os.open(folder, os.O_RDONLY)
                held.callback(os.close, descriptor)
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield


def _lock(descriptor: int) -> None:
    if fcntl is not None:
        with contextlib.suppress(OSError):
            fcntl.flock(descriptor, fcntl.LOCK_EX)


def _remove_unless_held(entry: Path) -> None:
    if fcntl is None or entry.is_symlink():
        entry.unlink()
        return
    descriptor = os.open(entry, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        entry.unlink()  # with the lock, for which the one who has just made the file then waits
    finally:
        os.close(descriptor)
