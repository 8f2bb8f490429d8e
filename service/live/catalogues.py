"""The live catalogues of all models of one process.

Knows models by name. Does not know what a catalogue does.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from espalier.live.journal import Journal
from espalier.live.journal_file import FILE

from ..live.catalogue import LiveCatalogue
from ..live.following import Following
from ..live.notices import Notices
from ..live.writer_feed import WriterFeed
from ..settings import Settings
from ..watch.metrics import Metrics


class LiveCatalogues:
    """What the catalogues of a models folder share. A catalogue is made with its model, and opens no file before it is used.

    catalogues  returns the catalogues by model
    on_erasure  called with a model's name, from any thread, when a person's events were erased from its journal
    """

    def __init__(self, settings: Settings, metrics: Metrics, catalogues: Callable[[], Mapping[str, LiveCatalogue]]) -> None:
        self._settings, self._metrics, self._catalogues = settings, metrics, catalogues
        self.notices = Notices(settings.run_folder)
        self.on_erasure: Callable[[str], None] = lambda model: None
        self._following: Following | None = None
        if settings.follow is not None:
            key = None if settings.follow_key is None else settings.follow_key.get_secret_value()
            feed = WriterFeed(settings.follow, key, settings.client_certificates)
            self._following = Following(feed, settings.models, catalogues)

    def new(self, model: str) -> LiveCatalogue:
        """Make the catalogue of a model."""
        journal = Journal(self._settings.models / model / FILE)
        catalogue = LiveCatalogue(model, journal, self.notices, self._metrics, self._settings.max_live, self._settings.follow)
        catalogue.thread.on_erasure = lambda: self.on_erasure(model)
        return catalogue

    def start(self) -> None:
        """Listen to other workers. To be called before any version is loaded."""
        self.notices.start()
        if self._following is not None:
            self._following.start()

    async def stop(self) -> None:
        """Finish the submitted writes, and close the journals."""
        if self._following is not None:
            await asyncio.to_thread(self._following.stop)
        await asyncio.gather(*(asyncio.to_thread(catalogue.stop) for catalogue in self._catalogues().values()))
        await asyncio.to_thread(self.notices.stop)
