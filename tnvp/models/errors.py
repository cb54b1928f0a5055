"""The one error of this package."""


class ModelError(ValueError):
    """A model that can't be built as asked."""
