"""Objects of a store by their keys, and its errors as StoreError. The only module that imports obstore.

A store is a URL: s3://BUCKET/PATH, gs://BUCKET/PATH, az://CONTAINER/PATH or file:///FOLDER. Keys, regions and endpoints come from the
environment as obstore reads it (AWS_ACCESS_KEY_ID, AWS_ENDPOINT_URL, …). Knows keys and bytes. Does not know what a model is.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
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
"""Bytes of one part of an upload, and parts that are uploaded at once. Their product is the memory of an upload."""
MAX_PARTS = 9_000
"""Most parts of one object; S3 allows 10,000. Larger files have larger parts."""
LIST_PAGE = 1000
NO_BUCKET = "NoSuchBucket|ContainerNotFound"
PARTS_DROPPED = "InvalidBlockList"
UNFINISHED_S = 86_400
"""Age at which the rest of an upload is deleted: its process was killed."""
READ_S, WRITE_S = 20, 300
"""Read timeouts of a store for reading and for writing: joining the parts of a large upload takes a store minutes."""
_RETRIES: Any = {
    "max_retries": 2,
    "retry_timeout": timedelta(seconds=30),
    "backoff": {"init_backoff": timedelta(milliseconds=100), "max_backoff": timedelta(seconds=2), "base": 2},
}


class Stored(NamedTuple):
    """An object in a list. etag: changes with every write; modified: by the clock of the store."""

    key: str
    size: int
    etag: str | None
    modified: datetime


class Content(NamedTuple):
    """A small object with the entity tag of this state."""

    content: bytes
    etag: str | None


class Objects:
    """The objects under a URL. Any thread may call any method. Every method may raise StoreUnavailable; docstrings name others."""

    def __init__(self, url: str, create: bool = False) -> None:
        """create: open the store for writing: make the folder of a file:// store, and wait longer for other stores. Raises StoreError."""
        try:
            self.url = check_url(url)
        except ValueError as error:
            raise StoreError(f"the store's URL: {error}") from error
        split_url = urlsplit(self.url)
        self._folder = Path(unquote(split_url.path)) if split_url.scheme == "file" else None
        if self._folder is not None and not create and not self._folder.is_dir():
            raise StoreMissing(f"{self.url}: no such folder")
        try:
            if self._folder is not None:
                self._store: Any = from_url(self.url, mkdir=create, automatic_cleanup=True)
            else:
                silence_s = WRITE_S if create else READ_S
                client: Any = {"allow_http": True, "connect_timeout": "5s", "read_timeout": f"{silence_s}s", "timeout": "30m"}
                self._store = from_url(self.url, client_options=client, retry_config=_RETRIES)
        except (BaseError, OSError) as error:
            raise StoreUnavailable(f"{self.url}: {_reason(error)}") from error

    def list(self, prefix: str, limit: int) -> Iterator[Stored]:
        """The objects below a prefix, a page at a time. Raises StoreDamaged if there are more than `limit`."""
        count = 0
        with self._store_errors(prefix):
            for page in obstore.list(self._store, prefix, chunk_size=LIST_PAGE):
                for meta in page:
                    count += 1
                    if count > limit:
                        raise StoreDamaged(f"{self.url}/{prefix}: more than {limit} objects")
                    yield Stored(meta["path"], meta["size"], meta["e_tag"], meta["last_modified"])

    def read(self, key: str, limit: int) -> Content | None:
        """A small object; None if there is none. Raises StoreDamaged if it has more than `limit` bytes."""
        with self._store_errors(key):
            try:
                response = obstore.get(self._store, key)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None
            if response.meta["size"] > limit:
                raise StoreDamaged(f"{self.url}/{key}: {response.meta['size']} bytes, at most {limit} expected")
            return Content(bytes(response.bytes()), response.meta["e_tag"])

    def head(self, key: str) -> Stored | None:
        """An object's size and entity tag, without its content; None if there is none."""
        with self._store_errors(key):
            try:
                meta = obstore.head(self._store, key)
            except FileNotFoundError as error:
                self._check_bucket(error)
                return None
            return Stored(key, meta["size"], meta["e_tag"], meta["last_modified"])

    def read_range(self, key: str, begin: int, end: int) -> memoryview:
        """Bytes `begin` to `end` of an object. Raises StoreMissing, and StoreDamaged if the object is shorter."""
        with self._store_errors(key):
            try:
                content = memoryview(obstore.get_range(self._store, key, start=begin, end=end))
            except FileNotFoundError as error:
                raise StoreMissing(f"{self.url}/{key}: missing") from error
        if len(content) != end - begin:
            raise StoreDamaged(f"{self.url}/{key}: bytes {begin} to {end} were asked for, {len(content)} came")
        return content

    def write(self, key: str, chunks: Iterator[bytes], size: int) -> None:
        """Write an object as a whole, or not at all if `chunks` raises. Large objects are uploaded in parts.

        Several processes may write the same content under one key. When one of them is done, Azure drops the parts of the others.
        """
        with self._store_errors(key):
            if size <= PART_BYTES:
                obstore.put(self._store, key, b"".join(chunks), use_multipart=False)
            else:
                part_bytes = max(PART_BYTES, -(-size // MAX_PARTS))
                try:
                    obstore.put(self._store, key, chunks, use_multipart=True, chunk_size=part_bytes, max_concurrency=PARTS)
                except BaseError as error:
                    if PARTS_DROPPED not in str(error) or (stored := self.head(key)) is None or stored.size != size:
                        raise

    def create(self, key: str, content: bytes) -> bool:
        """Write an object unless it exists. False if it exists."""
        with self._store_errors(key):
            try:
                obstore.put(self._store, key, content, mode="create", use_multipart=False)
            except AlreadyExistsError:
                return False
        return True

    def replace(self, key: str, content: bytes, etag: str) -> bool:
        """Write an object if it still has this entity tag. False if it has not."""
        with self._store_errors(key):
            if self._folder is not None:
                with file_lock(self._folder / ".lock"):  # a file system has no conditional write
                    current = self.head(key)
                    if current is None or current.etag != etag:
                        return False
                    obstore.put(self._store, key, content, use_multipart=False)
                    return True
            try:
                obstore.put(self._store, key, content, mode={"e_tag": etag}, use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                return False
        return True

    def delete(self, key: str) -> None:
        """Delete an object if it exists."""
        with self._store_errors(key):
            try:
                obstore.delete(self._store, key)
            except FileNotFoundError:
                return

    def delete_partial(self, prefix: str, older_than_s: float = UNFINISHED_S) -> None:
        """Delete the files `<key>#<number>` that killed uploads left below a prefix of a file:// store; `list` does not show them.

        Other stores can be set to delete incomplete uploads.
        """
        with self._store_errors(prefix):
            for file in () if self._folder is None else (self._folder / prefix).rglob("*#*"):
                with suppress(FileNotFoundError):
                    if re.fullmatch(r".+#\d+", file.name) and time.time() - file.stat().st_mtime >= older_than_s:
                        file.unlink()

    def _check_bucket(self, error: Exception) -> None:
        """Raise StoreMissing if an error says that the bucket or container does not exist."""
        if re.search(NO_BUCKET, str(error)):
            raise StoreMissing(f"{self.url}: {_reason(error)}") from error

    @contextmanager
    def _store_errors(self, key: str) -> Iterator[None]:
        """Convert obstore's errors to StoreError, with the object's URL."""
        try:
            yield
        except (BaseError, OSError) as error:
            self._check_bucket(error)
            raise StoreUnavailable(f"{self.url}/{key}: {_reason(error)}") from error


def _reason(error: Exception) -> str:
    """An error's reason in one line, without addresses, request ids or signatures."""
    text = str(error)
    if "169.254.169.254" in text:  # where clouds keep the keys of their machines
        return "no keys in the environment, and this machine has none of its own: set AWS_ACCESS_KEY_ID or what your store takes"
    status, code = re.search(r"status code: (\d{3}[ A-Za-z]*)", text), re.search(r"<Code>(\w{1,64})</Code>", text)
    if status is not None:
        return status[1].strip() + (f" ({code[1]})" if code is not None else "")
    messages = re.findall(r'message: "([^"]{1,200})"', text)
    if messages and "OpenCredentials" not in text:  # whose first line names the file
        return str(messages[-1])
    if "TimedOut" in text:
        return "no answer in time"
    if "dns" in text.lower():
        return "its host name is not known"
    return re.sub(r"\s*https?://\S+", "", text.splitlines()[0] if text else type(error).__name__)[:200]
