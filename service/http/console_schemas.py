"""The JSON of the routes that the console asks for: answers are documented by these classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class HeldOutQuery(BaseModel):
    """A query that the model was not trained on."""

    query: dict[str, Any] = Field(description="A query as `POST /retrieve` takes it.")
    relevant: list[str] = Field(description="Ids of the items that it should find.")
    recall: dict[str, float | None] = Field(description="m → recall@m when the version was made, by its default beam; empty if unknown.")


class HeldOutQueries(BaseModel):
    queries: list[HeldOutQuery]
