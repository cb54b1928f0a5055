"""The one error of the method: bad use, or a network that can't be pruned safely."""


class PruningError(ValueError):
    """Raised before anything was changed; the message names the cause, the value and the way out."""
