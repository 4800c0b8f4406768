"""Settings that do not hold, in the words of the command line."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import ValidationError

__all__ = ["complaint"]


def complaint(error: ValidationError) -> str:
    """The first problem, with the option that it is about. The prefix that pydantic gives to an error of a validator of
    ours is left out."""
    problem = error.errors(include_url=False)[0]
    field = ".".join(str(part) for part in problem["loc"]).replace("_", "-")
    message = problem["msg"].removeprefix("Value error, ")
    return f"--{field}: {message}" if field else message
