"""Opening an object store by URL, and the store that is a folder.

Invariant: a reader of the folder sees whole objects only. Bytes are written to a reserved folder beside them, flushed
to disk, then renamed; what a dead writer left there is never listed and is swept when a store is next opened.
"""

from __future__ import annotations

import errno
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO
from urllib.parse import unquote, urlsplit

from app.protocol.errors import BadInput, Conflict, NotFound, Unavailable
from app.storage.objects import CHECK_KEY, ObjectInfo, ObjectStore, PresignedPut, at_most, validate_key
from app.storage.s3 import NOT_A_STORE, S3Store, check_expires, parse_s3_url
from app.storage.signing import Grant, check_signature, signed_url

__all__ = ["FolderStore", "Grant", "S3Store", "check_signature", "open_store", "parse_folder_url"]

TEMP_FOLDER = ".echo2-tmp"
"""Reserved: no key may begin with it."""
STALE_TEMP_S = 24 * 3600
RENAME_ATTEMPTS = 5
_BLOCK = 1 << 20


def open_store(
    url: str, *, endpoint_url: str | None = None, public_url: str | None = None, signing_key: bytes | None = None
) -> ObjectStore:
    """The store that `url` names: `file:///absolute/path` (created if absent) or `s3://bucket/prefix`.

    `endpoint_url` is for S3 services other than AWS; `public_url` and `signing_key` let a folder presign URLs that the
    control service serves. Raises BadInput for any other URL, or a folder that can't be used.
    """
    if url.startswith("s3://"):
        bucket, prefix = parse_s3_url(url)
        return S3Store(bucket, prefix, endpoint_url=endpoint_url)
    return FolderStore(parse_folder_url(url), public_url=public_url, signing_key=signing_key)


def parse_folder_url(url: str) -> Path:
    """The folder of `file:///absolute/path`. Raises BadInput."""
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise BadInput(NOT_A_STORE.format(url)) from error
    path = unquote(parts.path)
    here = url.startswith("file://") and parts.netloc in ("", "localhost") and not parts.query and not parts.fragment
    if not here or not path.startswith("/") or not path.strip("/") or "\0" in path:
        raise BadInput(NOT_A_STORE.format(url))
    return Path(os.path.normpath(path))


class FolderStore:
    """Objects as files under one folder.

    `a` and `a/b` can't both be objects, as they could in S3; whoever comes second gets Conflict.
    """

    def __init__(
        self,
        root: Path,
        *,
        public_url: str | None = None,
        signing_key: bytes | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._public_url = public_url
        self._signing_key = signing_key
        self._clock = clock
        try:
            self._temp = root / TEMP_FOLDER
            self._temp.mkdir(parents=True, exist_ok=True)
            self._root = root.resolve(strict=True)
            self._sweep()
        except OSError as error:
            raise BadInput(f"the folder {root} can't be used as object store: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"FolderStore({self._root})"

    def check(self) -> None:
        """As the protocol says."""
        try:
            self.put(CHECK_KEY, b"")
        except (Conflict, Unavailable) as error:
            raise Unavailable(f"ECHO2_OBJECT_STORE_URL, ECHO2_STATE_DIR: {error.detail}") from error

    def put(self, key: str, data: bytes) -> None:
        """Store bytes, replacing what was there. Raises BadInput, Conflict, Unavailable (disk full, …)."""
        with self.writer(key) as file:
            file.write(data)

    def put_file(self, key: str, path: Path) -> None:
        """Store a copy of a file. Raises as `put`; OSError if the file can't be opened."""
        with path.open("rb") as source, self.writer(key) as file:
            shutil.copyfileobj(source, file, _BLOCK)

    @contextmanager
    def writer(self, key: str) -> Iterator[BinaryIO]:
        """A file to write an object into; it becomes the object when the block ends without an error."""
        target, temp = self._path(key), self._temp / uuid.uuid4().hex
        with _disk_errors(key):
            try:
                with temp.open("xb") as file:
                    yield file
                    file.flush()
                    os.fsync(file.fileno())
                _rename(temp, target)
            except FileNotFoundError as error:
                raise Unavailable(f"the object store's folder {self._root} is gone") from error
            finally:
                temp.unlink(missing_ok=True)

    def path(self, key: str) -> Path:
        """Where an object lies, for a server that sends files. Raises NotFound, BadInput."""
        path = self._path(key)
        with _disk_errors(key):
            if not path.is_file():
                raise NotFound(f"there is no object {key}")
        return path

    def get(self, key: str, most: int | None = None) -> bytes:
        """All bytes of an object. Raises NotFound, BadInput, Unavailable; TooLarge if it has more than `most`."""
        with _disk_errors(key), self.path(key).open("rb") as file:
            at_most(key, os.fstat(file.fileno()).st_size, most)
            return file.read()

    def get_file(self, key: str, path: Path) -> None:
        """Copy an object into a file. Raises as `get`; OSError if the file can't be written."""
        with _disk_errors(key):
            source = self.path(key).open("rb")
        with source, path.open("wb") as file:
            shutil.copyfileobj(source, file, _BLOCK)

    def head(self, key: str) -> ObjectInfo | None:
        """Size, or None if there is no such object."""
        try:
            with _disk_errors(key):
                return ObjectInfo(key, self.path(key).stat().st_size)
        except NotFound:
            return None

    def list(self, prefix: str) -> Iterator[ObjectInfo]:
        """Objects whose key begins with `prefix`, in key order. What vanishes meanwhile is left out."""
        folder = prefix.rpartition("/")[0]
        start = self._path(folder) if folder else self._root
        return _walk(start, f"{folder}/" if folder else "", prefix)

    def delete(self, key: str) -> None:
        """Remove the object, and the folders that it leaves empty; absent is fine."""
        path = self._path(key)
        with _disk_errors(key):
            if path.is_file():
                path.unlink(missing_ok=True)
        with suppress(OSError):
            for folder in path.parents:
                if folder == self._root:
                    break
                folder.rmdir()

    def presign_get(self, key: str, expires_s: int) -> str:
        """URL of the control service that lets anyone GET this object for `expires_s` seconds (at most 7 days)."""
        return self._signed(Grant(validate_key(key), "GET", self._expires(expires_s), None))

    def presign_put(self, key: str, expires_s: int, max_bytes: int) -> PresignedPut:
        """URL of the control service that lets anyone PUT at most `max_bytes` there for `expires_s` seconds."""
        if max_bytes < 1:
            raise BadInput(f"max_bytes must be at least 1, not {max_bytes}")
        return PresignedPut(self._signed(Grant(validate_key(key), "PUT", self._expires(expires_s), max_bytes)), {})

    def _expires(self, expires_s: int) -> int:
        return int(self._clock()) + check_expires(expires_s)

    def _signed(self, grant: Grant) -> str:
        if not self._public_url or not self._signing_key:
            raise Unavailable("this folder store was opened without public_url and signing_key: it can't presign URLs")
        return signed_url(self._public_url, self._signing_key, grant)

    def _path(self, key: str) -> Path:
        """The file of a key. Raises BadInput for a key that is unsafe, reserved, or leads out by a link."""
        path = self._root / validate_key(key)
        try:
            resolved = path.resolve()
        except (OSError, ValueError, RuntimeError) as error:
            raise BadInput(f"{key[:80]!r} can't be a file name on this machine") from error
        if not resolved.is_relative_to(self._root) or resolved.is_relative_to(self._root / TEMP_FOLDER):
            raise BadInput(f"{key[:80]!r} is not a valid object key: it leaves the store")
        return path

    def _sweep(self) -> None:
        with os.scandir(self._temp) as entries:
            for entry in entries:
                with suppress(FileNotFoundError):
                    if self._clock() - entry.stat().st_mtime > STALE_TEMP_S:
                        os.unlink(entry.path)


def _rename(temp: Path, target: Path) -> None:
    for attempt in range(1, RENAME_ATTEMPTS + 1):
        try:
            _make_folders(target.parent)
            os.replace(temp, target)
        except FileNotFoundError:
            # A delete of the last other object there took the empty folder away in between.
            if attempt == RENAME_ATTEMPTS or not temp.exists():
                raise
        except IsADirectoryError:
            # A writer that died after making its folders leaves empty ones; those are nobody's object.
            if attempt == RENAME_ATTEMPTS:
                raise
            _remove_empty(target)
        else:
            with suppress(FileNotFoundError):
                _sync_folder(target.parent)
            return


def _remove_empty(folder: Path) -> None:
    """Remove a folder that holds nothing but empty folders; leave every other."""
    for inner, _, _ in os.walk(folder, topdown=False):
        with suppress(OSError):
            os.rmdir(inner)


def _walk(folder: Path, base: str, prefix: str) -> Iterator[ObjectInfo]:
    """Files under `folder` in key order. A folder sorts as its name and a slash, as its keys do."""
    try:
        with os.scandir(folder) as entries:
            found = sorted(
                (f"{base}{e.name}/" if e.is_dir(follow_symlinks=False) else base + e.name, e) for e in entries
            )
    except (FileNotFoundError, NotADirectoryError):
        return
    for key, entry in found:
        if key == f"{TEMP_FOLDER}/" or not key.startswith(prefix):
            continue
        if key.endswith("/"):
            yield from _walk(Path(entry.path), key, prefix)
        else:
            with suppress(FileNotFoundError):
                if entry.is_file(follow_symlinks=False):
                    yield ObjectInfo(key, entry.stat(follow_symlinks=False).st_size)


@contextmanager
def _disk_errors(key: str) -> Iterator[None]:
    """What the file system says, as errors of ours."""
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"there is no object {key}") from error
    except (NotADirectoryError, IsADirectoryError, FileExistsError) as error:
        raise Conflict(f"{key} can't be an object beside what is there: one would be a folder of the other") from error
    except OSError as error:
        if error.errno == errno.ENAMETOOLONG:
            raise BadInput(f"{key[:80]!r} is too long for a file name on this machine") from error
        raise Unavailable(f"the object store's folder can't be used: {error.strerror}") from error


def _make_folders(folder: Path) -> None:
    """Make a folder and its parents last, each one's entry flushed to disk."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _sync_folder(new.parent)


def _sync_folder(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
