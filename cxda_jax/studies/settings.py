"""Tests of another form than a config's own: other tasks, the first images of their support, or other fine-tuning
steps."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from cxda_jax.config.reading import Changes, Config, replaced
from cxda_jax.data.episodes import Context
from cxda_jax.errors import UserError, brief

SHAPES = {"num_domains": "support domains", "support_size": "support images"}  # kinds that change the shape of a task
# Kinds that let only the first images of a usual task's support arrive, by the order in which they do.
ARRIVALS = {"mixed": "context", "by_domain": "by_domain", "by_class": "by_class"}
CONTEXTS = tuple(ARRIVALS.values())
STEPS = "finetune.steps"
_TEXT = re.compile(rf"({'|'.join(map(re.escape, (*SHAPES, *CONTEXTS, STEPS)))})=([0-9]{{1,9}})")


class Setting(NamedTuple):
    """One kind and its number, such as num_domains=10; USUAL is none."""

    kind: str = ""
    number: int = 0

    def __str__(self) -> str:
        return f"{self.kind}={self.number}" if self.kind else ""

    @property
    def changes(self) -> Changes:
        """The fields that it changes in a config, other than the shape of a task."""
        return [(self.kind, str(self.number))] if self.kind == STEPS else []

    @property
    def context(self) -> Context | None:
        """The part of the support that has arrived; None for the whole of it."""
        orders = {kind: order for order, kind in ARRIVALS.items()}
        return Context(self.number, orders[self.kind]) if self.kind in CONTEXTS else None


USUAL = Setting()


def of_flag(kind: str, numbers: Sequence[str]) -> list[Setting]:
    """The settings of a flag such as --num_domains=1,10."""
    least = 0 if kind in CONTEXTS else 1
    for text in numbers:
        if not text.isdecimal() or not least <= int(text) < 10**9:
            flag = "context" if kind in CONTEXTS else kind.removeprefix("finetune.")
            raise UserError(f"--{flag}={brief(text, 40)}: give whole numbers of at least {least}, such as {least},10")
    return [Setting(kind, int(text)) for text in numbers]


def parse(text: str) -> Setting:
    """The setting that a result's row names; a ValueError where it names none."""
    parts = _TEXT.fullmatch(text)
    if text and not parts:
        raise ValueError(f"setting={brief(repr(text), 40)}, expected one such as num_domains=10, or nothing")
    return Setting(parts[1], int(parts[2])) if parts else USUAL


def usual_number(kind: str, config: Mapping[str, Any]) -> int:
    """The number of support domains, or of images, in a config's own tasks; a result's config may be an old one."""
    episode = {"num_domains": 5, "per_domain": 20} | dict(config.get("episode", {}))
    return episode["num_domains"] * (episode["per_domain"] if kind == "support_size" else 1)


def reshaped(config: Config, setting: Setting) -> Config:
    """The config with tasks of the setting's shape. evaluation.reshaped_queries says how many queries they have."""
    if setting.kind not in SHAPES:
        return config
    episode = config.episode
    support = setting.number if setting.kind == "support_size" else usual_number("support_size", config)
    domains = setting.number if setting.kind == "num_domains" else episode.num_domains
    if support < domains:
        fault = f"{support} support images cannot come from {domains} domains"
        raise UserError(fault, f"--{setting.kind}", setting.number, "ask for more images")
    each = support // domains
    queries = episode.num_query if config.evaluation.reshaped_queries == "fixed" else each
    return replaced(config, episode={"num_domains": domains, "per_domain": each, "num_query": queries})
