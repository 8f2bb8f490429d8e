"""The JSON of health_routes.py: answers are documented by these classes."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, Field


class Alert(BaseModel):
    """The condition of a Prometheus alert, on this service's own numbers."""

    name: str
    firing: bool
    since: int | None = Field(description="Since when its condition holds, in seconds since 1970; null where it does not fire.")
    value: float | None = Field(description="Null where it is not known.")
    threshold: float | None
    what: str = Field(description="What the value is.")


class Event(BaseModel):
    at: int = Field(description="Seconds since 1970, to the minute.")
    what: str


class UnknownId(BaseModel):
    id: str = Field(description="The first 512 bytes of it.")
    count: int = Field(description="How often it was asked for at least, in the last 12 to 24 hours.")


class Health(BaseModel):
    """The last 24 hours of a model."""

    model: str
    version: int | None = Field(description="The default version.")
    now: int = Field(description="Seconds since 1970.")
    since: int = Field(description="Time of the first number.")
    step_s: int = Field(description="Seconds between two numbers of a series.")
    at: list[int] = Field(description="The times of the numbers of all series.")
    recall_m: int | None = Field(description="m of the series of recall.")
    series: dict[str, list[float | None]] = Field(description="Name → a number for each time; null where it is not known.")
    alerts: list[Alert]
    events: list[Event] = Field(description="Oldest first.")
    unknown_ids: list[UnknownId] = Field(description="The ids that queries asked for most, and that the catalogue does not have.")


class SampledQuery(BaseModel):
    at: float = Field(description="Seconds since 1970.")
    version: int
    query: dict[str, Any] = Field(description="A query as `POST /retrieve` takes it.")


class Samples(BaseModel):
    """Customers' most recent queries, newest first."""

    queries: list[SampledQuery]
    most: int = Field(description="How many are kept of all models; 0: none.")
