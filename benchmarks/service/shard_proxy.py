"""A proxy before a replica that passes its answers on, late, or gives rubbish instead of them.

Knows HTTP. Does not know what is asked.
"""

from __future__ import annotations

import asyncio
import threading
from typing import Literal

import aiohttp
from aiohttp import web

Mood = Literal["well", "slow", "garbage"]
LATE_S = 0.5
"""How much later a slow replica answers."""
RUBBISH = b"\x00rubbish" * 64
HOP = frozenset({"connection", "content-length", "transfer-encoding", "keep-alive", "host"})
"""Headers that belong to one connection."""


class Proxy:
    """In a thread of its own, on a free port. mood: how it treats searches from the next one on; other requests always pass."""

    def __init__(self, target: str) -> None:
        self.mood: Mood = "well"
        self.url = ""
        self._target = target
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._run, name="proxy", daemon=True)

    def start(self) -> None:
        self._thread.start()
        if not self._ready.wait(10):
            raise RuntimeError("the proxy did not start")

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join()

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        session, runner = self._loop.run_until_complete(self._opened())
        self._ready.set()
        try:
            self._loop.run_forever()
        finally:
            self._loop.run_until_complete(session.close())
            self._loop.run_until_complete(runner.cleanup())
            self._loop.close()

    async def _opened(self) -> tuple[aiohttp.ClientSession, web.AppRunner]:
        self._session = aiohttp.ClientSession(auto_decompress=False)
        app = web.Application(client_max_size=1 << 30)
        app.router.add_route("*", "/{path:.*}", self._pass_on)
        runner = web.AppRunner(app)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        return self._session, runner

    async def _pass_on(self, request: web.Request) -> web.Response:
        body, mood = await request.read(), self.mood if request.method == "POST" else "well"
        headers = {name: value for name, value in request.headers.items() if name.lower() not in HOP}
        try:
            async with self._session.request(request.method, self._target + request.path_qs, data=body, headers=headers) as answer:
                content, status, kind = await answer.read(), answer.status, answer.headers.get("Content-Type", "text/plain")
        except aiohttp.ClientError:
            return web.Response(status=502)
        if mood == "slow":
            await asyncio.sleep(LATE_S)
        if mood == "garbage":
            content = RUBBISH
        return web.Response(body=content, status=status, headers={"Content-Type": kind})
