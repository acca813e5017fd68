"""Episodes as row numbers. The images of a task are a pure function of (seed, stream, task number).

No iterator has a state, so a run can resume at any step. Two readers of the same plan give episodes of equal bits.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cxda_jax.data.store import DomainStore
from cxda_jax.errors import UserError, brief


class EpisodeSpec(NamedTuple):
    """The shape of a task: distinct domains, support images of each, and queries of one of them.

    Attributes:
      replacement: draw with replacement inside a domain, as ARM does. An image may then be in support and query.
      mixed: there is no support, and the queries are distinct images of all domains.
    """

    num_domains: int = 5
    per_domain: int = 20
    num_query: int = 20
    replacement: bool = False
    mixed: bool = False


class Plan(NamedTuple):
    """Row numbers of a DomainStore for several tasks."""

    support: np.ndarray  # int32 [tasks, n_support]
    query: np.ndarray  # int32 [tasks, n_query]


def check_spec(spec: EpisodeSpec, store: DomainStore, split: str) -> None:
    """Raises a UserError if a split of the store cannot give such tasks."""
    for field in ("num_query",) if spec.mixed else ("num_domains", "per_domain", "num_query"):
        if getattr(spec, field) < 1:
            raise UserError(f"{field}={getattr(spec, field)} must be at least 1")
    domains, where = store.domains(split), f"split {split!r} of {store.info.name}"
    sizes = np.diff(store.offsets)[domains]
    need = 1 if spec.replacement else spec.per_domain + spec.num_query
    if spec.mixed:
        if sizes.sum() < spec.num_query:
            raise UserError(
                f"{where} has {sizes.sum()} images, a mixed batch needs {spec.num_query}: "
                "lower num_domains, per_domain or num_query"
            )
    elif len(domains) < spec.num_domains:
        raise UserError(f"num_domains={spec.num_domains} but {where} has {len(domains)} domains")
    elif sizes.min() < need:
        name = store.domain_names[domains[sizes.argmin()]]
        raise UserError(
            f"domain {brief(repr(name))} of split {split!r} has {sizes.min()} images, per_domain + num_query needs "
            f"{need}; drop the domain or ask for fewer"
        )


def mixed_spec(spec: EpisodeSpec) -> EpisodeSpec:
    """Shuffled batches of as many images as an episode of `spec` holds."""
    images = spec.num_domains * spec.per_domain + spec.num_query
    return EpisodeSpec(num_domains=0, per_domain=0, num_query=images, mixed=True)


def sample_plans(
    spec: EpisodeSpec, offsets: np.ndarray, domains: np.ndarray, seed: int, tasks: Sequence[int], stream: int = 0
) -> Plan:
    """Draws the plans of numbered tasks. Domains are uniform and distinct; images are uniform inside their domain.

    Tasks of equal seed, number and stream draw alike, whatever the domains.

    Args:
      offsets: where each domain's rows begin in the store, and where the last ends: [domains + 1].
      domains: numbers of the domains to draw from.
      tasks: their numbers.
      stream: sets apart the random numbers of different uses. Training has stream 0.
    """
    support = np.empty((len(tasks), spec.num_domains * spec.per_domain), np.int32)
    query = np.empty((len(tasks), spec.num_query), np.int32)
    ends = np.cumsum(np.diff(offsets)[domains])
    for i, task in enumerate(tasks):
        rng = np.random.Generator(np.random.Philox(key=[seed, task], counter=[0, 0, 0, stream]))
        if spec.mixed:
            drawn = rng.choice(ends[-1], spec.num_query, replace=False)
            which = np.searchsorted(ends, drawn, side="right")
            query[i] = offsets[domains[which] + 1] - (ends[which] - drawn)
            continue
        chosen = domains[rng.choice(len(domains), spec.num_domains, replace=False)]
        asked = rng.integers(spec.num_domains)
        for j, domain in enumerate(chosen):
            start, stop = offsets[domain], offsets[domain + 1]
            count = spec.per_domain + (spec.num_query if j == asked else 0)
            rows = start + rng.choice(stop - start, count, replace=spec.replacement)
            support[i, j * spec.per_domain : (j + 1) * spec.per_domain] = rows[: spec.per_domain]
            if j == asked:
                query[i] = rows[spec.per_domain :]
    return Plan(support, query)
