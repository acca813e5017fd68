"""The fields of configs. Configs of your own start from what this package gives."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cxda_jax.config.reading import default, read, replaced, shrink, variant

__all__ = ["default", "read", "replaced", "shrink", "variant"]


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cxda_jax.config import reading  # which knows the methods, whose files need the fields

    return getattr(reading, name)
