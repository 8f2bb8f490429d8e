"""The split into training, validation and test data: the keys of `data.split`."""

from __future__ import annotations

from datetime import UTC, date, datetime, time
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, FiniteFloat, model_validator

from espalier.errors import InvalidConfig

from ..specification.sections import Section, default_kind


def _iso(value: object) -> object:
    """A date of TOML as text; other values as they are."""
    return value.isoformat() if isinstance(value, date) else value


Time = Annotated[int | FiniteFloat | str, BeforeValidator(_iso)]
"""A point in time in the log's form: a number, or an ISO 8601 date, perhaps with a time of day."""


class _Split(Section):
    unseen_items: float = Field(default=0.0, ge=0, lt=1)
    """share of items hidden from training. Drawn by the seed. `evaluate --unseen` measures whether they are found all the same"""


class UserSplit(_Split):
    """Held-out users: the first half of a list is the query, the second half is relevant (OTM)."""

    kind: Literal["users"] = "users"
    test_share: float = Field(default=0.1, ge=0, lt=1)
    """share of test users. They are measured on once, at the end"""
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """share of validation users. They choose weights, γ and calibration"""

    @model_validator(mode="after")
    def _leaves_training_users(self) -> UserSplit:
        if self.test_share + self.validation_share >= 1:
            expected = f"less than {1 - self.test_share:g}, 1 less data.split.test_share"
            raise InvalidConfig("data.split.validation_share", self.validation_share, expected)
        return self


class LastSplit(_Split):
    """Leave one out: the last item of every list is relevant for testing, the one before it for validation (SASRec, BERT4Rec)."""

    kind: Literal["last"] = "last"


class DateSplit(_Split):
    """Two points in time: events before the first are training data, up to the second validation, then test. As in production."""

    kind: Literal["date"] = "date"
    validation_from: Time | None = None
    """first time of validation. As the log writes times; by default 80 % of the events lie before"""
    test_from: Time | None = None
    """first time of the test. By default 90 % of the events lie before"""


class FileSplit(_Split):
    """A second file, in the format of the log, with what is relevant for each user of the log."""

    kind: Literal["file"] = "file"
    test: Path
    """the test file. Its users and items are those of the log"""
    validation_share: float = Field(default=0.1, gt=0, lt=1)
    """share of validation users. From their lists as much is hidden as the file hides"""


SplitConfig = Annotated[UserSplit | LastSplit | DateSplit | FileSplit, Field(discriminator="kind"), default_kind("users")]


def microseconds(value: str) -> int:
    """Microseconds from 1970 to an ISO 8601 date and time; UTC where it names no zone. Raises ValueError."""
    moment = datetime.fromisoformat(value) if len(value) > 10 else datetime.combine(date.fromisoformat(value), time())
    if moment.tzinfo is None:
        moment = moment.replace(tzinfo=UTC)
    since = moment - datetime(1970, 1, 1, tzinfo=UTC)
    return (since.days * 86_400 + since.seconds) * 1_000_000 + since.microseconds
