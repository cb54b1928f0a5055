"""The one error of the method: bad use, or a network that can't be pruned safely."""

from __future__ import annotations

from collections.abc import Iterable


class PruningError(ValueError):
    """Raised before anything was changed; the message names the cause, the value and the way out."""


def choose(what: str, name: str, table: Iterable[str]) -> None:
    """Raise unless ``name`` is one of the names in ``table``."""
    if not isinstance(name, str) or name not in table:
        raise PruningError(f"unknown {what} {name!r}: choose one of {', '.join(table)}")


def damaged(why: str) -> PruningError:
    """Of a pruner's state that can't be followed."""
    return PruningError(
        f"the state is damaged or of another network: {why}; give restore() what state() of a pruner of this network returned"
    )
