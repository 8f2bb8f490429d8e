"""Objects of a store by their keys, and the errors of stores in our words. The only module that imports obstore.

A store is a URL: s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER. Keys, regions and endpoints come from the
environment as obstore reads it (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …). Knows keys and bytes. Does not know what a model is.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote, urlsplit

import obstore
from obstore.exceptions import AlreadyExistsError, BaseError, PreconditionError
from obstore.store import from_url

from espalier.errors import StoreDamaged, StoreError, StoreMissing, StoreUnavailable
from espalier.file_lock import file_lock
from espalier.store.urls import check_url

PART_BYTES, PARTS = 8 << 20, 4
"""Bytes of one part of an upload, and parts that are under way together: their product is the memory that an upload takes."""
MAX_PARTS = 9_000
"""Of one object; S3 allows 10,000. Larger files have larger parts."""
LIST_PAGE = 1000
NO_BUCKET = "NoSuchBucket|ContainerNotFound"
READ_S, WRITE_S = 20, 300
"""Longest silence of a store, of one that is read from and one that is written to: putting the parts of a large upload together takes it
minutes."""
_RETRIES: Any = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}


class Stored(NamedTuple):
    """An object in a list. etag: another one means that it was written; modified: by the clock of the store."""

    key: str
    size: int
    etag: str | None
    modified: datetime


class Content(NamedTuple):
    """A small object with what identifies this state of it."""

    content: bytes
    etag: str | None


class Objects:
    """The objects under a URL. All methods may be called from any thread and raise StoreUnavailable; others say what else."""

    def __init__(self, url: str, create: bool = False) -> None:
        """create: to publish. A file:// store gets its folder, and others more time to answer. Raises StoreError."""
        try:
            self.url = check_url(url)
        except ValueError as error:
            raise StoreError(f"the store's URL: {error}") from error
        parts = urlsplit(self.url)
        self._folder = Path(unquote(parts.path)) if parts.scheme == "file" else None
        if self._folder is not None and not create and not self._folder.is_dir():
            raise StoreMissing(f"{self.url}: no such folder")
        try:
            if self._folder is not None:
                self._store: Any = from_url(self.url, mkdir=create)
            else:
                silence_s = WRITE_S if create else READ_S
                client: Any = {"allow_http": True, "connect_timeout": "5s", "read_timeout": f"{silence_s}s", "timeout": "30m"}
                self._store = from_url(self.url, client_options=client, retry_config=_RETRIES)
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self.url}: {_why(error)}") from error

    def list(self, prefix: str, most: int) -> Iterator[Stored]:
        """The objects below a prefix, a page at a time. Raises StoreDamaged where there are more than `most`."""
        count = 0
        with self._said(prefix):
            for page in obstore.list(self._store, prefix, chunk_size=LIST_PAGE):
                for found in page:
                    count += 1
                    if count > most:
                        raise StoreDamaged(f"{self.url}/{prefix}: more than {most} objects")
                    yield Stored(found["path"], found["size"], found["e_tag"], found["last_modified"])

    def read(self, key: str, most: int) -> Content | None:
        """A small object; None where there is none. Raises StoreDamaged where it has more than `most` bytes."""
        with self._said(key):
            try:
                found = obstore.get(self._store, key)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None
            if found.meta["size"] > most:
                raise StoreDamaged(f"{self.url}/{key}: {found.meta['size']} bytes, at most {most} expected")
            return Content(bytes(found.bytes()), found.meta["e_tag"])

    def head(self, key: str) -> Stored | None:
        """An object without its content; None where there is none."""
        with self._said(key):
            try:
                found = obstore.head(self._store, key)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None
            return Stored(key, found["size"], found["e_tag"], found["last_modified"])

    def read_range(self, key: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of an object. Raises StoreMissing, and StoreDamaged where it has no such bytes."""
        with self._said(key):
            try:
                found = memoryview(obstore.get_range(self._store, key, start=begin, end=end))
            except FileNotFoundError as error:
                raise StoreMissing(f"{self.url}/{key}: missing") from error
        if len(found) != end - begin:
            raise StoreDamaged(f"{self.url}/{key}: bytes {begin} to {end} were asked for, {len(found)} came")
        return found

    def write(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        """Write an object as a whole, or nothing of it where `chunks` raises. Large ones go in parts."""
        with self._said(key):
            if size <= PART_BYTES:
                obstore.put(self._store, key, b"".join(chunks), use_multipart=False)
            else:
                part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
                obstore.put(self._store, key, chunks, use_multipart=True, chunk_size=part_bytes, max_concurrency=PARTS)

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless there is one. False where there is."""
        with self._said(key):
            try:
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Write an object if it still is the one with this entity tag. False where it is not."""
        with self._said(key):
            if self._folder is not None:
                with file_lock(self._folder / ".lock"):  # a file system has no conditional write
                    now = self.head(key)
                    if now is None or now.etag != etag:
                        return False
                    obstore.put(self._store, key, content, use_multipart=False)
                    return True
            try:
                obstore.put(self._store, key, content, mode={"e_tag": etag}, use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                return False
        return True

    def delete(self, key: str) -> None:
        """Delete an object; nothing happens where there is none."""
        with self._said(key):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    def _check_bucket(self, error: Exception) -> None:
        """Raise StoreMissing where the whole bucket or container is not there."""
        if re.search(NO_BUCKET, str(error)):
            raise StoreMissing(f"{self.url}: {_why(error)}") from error

    @contextmanager
    def _said(self, key: str) -> Iterator[None]:
        """obstore's errors as ours, which name the place."""
        try:
            yield
        except (BaseError, OSError) as error:
            self._check_bucket(error)
            raise StoreUnavailable(f"{self.url}/{key}: {_why(error)}") from error


def _why(error: Exception) -> str:
    """What is wrong, in a line without addresses, request ids or signatures."""
    text = str(error)
    if "169.254.169.254" in text:  # where clouds keep the keys of their machines
        return "no keys in the environment, and this machine has none of its own: set AWS_ACCESS_KEY_ID or what your store takes"
    status, code = re.search(r"status code: (\d{3}[ A-Za-z]*)", text), re.search(r"<Code>(\w{1,64})</Code>", text)
    if status is not None:
        return status[1].strip() + (f" ({code[1]})" if code is not None else "")
    messages = re.findall(r'message: "([^"]{1,200})"', text)
    if messages:
        return str(messages[-1])
    if "TimedOut" in text:
        return "no answer in time"
    if "dns" in text.lower():
        return "its host name is not known"
    return re.sub(r"\s*https?://\S+", "", text.splitlines()[0] if text else type(error).__name__)[:200]
