"""Episodes as row numbers: which images form a task is a pure function of (seed, stream, task number).

Nothing is iterated, so a run resumes at any step without iterator state, and two readers of the same plan give
bit-identical episodes.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from cxda_jax.data.store import DomainStore
from cxda_jax.types import UserError, brief


class EpisodeSpec(NamedTuple):
    """The shape of a task: distinct domains, support images from each, and queries from one of them."""

    num_domains: int = 5
    per_domain: int = 20
    num_query: int = 20
    replacement: bool = False  # draw with replacement inside a domain, as ARM does; support and query may then meet
    mixed: bool = False  # queries are distinct images of all domains alike, and there is no support


class Plan(NamedTuple):
    """Row numbers of a DomainStore for several tasks: support int32 [tasks, n_support], query int32 [tasks, n_query]."""

    support: np.ndarray
    query: np.ndarray


def check_spec(spec: EpisodeSpec, store: DomainStore, split: str) -> None:
    """Raises a UserError where the split cannot give such tasks."""
    for field in ("num_query",) if spec.mixed else ("num_domains", "per_domain", "num_query"):
        if getattr(spec, field) < 1:
            raise UserError(f"{field}={getattr(spec, field)} must be at least 1")
    if spec.mixed:
        images = np.diff(store.offsets)[store.domains(split)].sum()
        if images < spec.num_query:
            raise UserError(
                f"split {split!r} of {store.info.name} has {images} images, a mixed batch needs {spec.num_query}: "
                "lower num_domains, per_domain or num_query"
            )
        return
    domains = store.domains(split)
    if len(domains) < spec.num_domains:
        raise UserError(
            f"num_domains={spec.num_domains} but split {split!r} of {store.info.name} has {len(domains)} domains"
        )
    sizes = np.diff(store.offsets)[domains]
    need = 1 if spec.replacement else spec.per_domain + spec.num_query
    if sizes.min() < need:
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
    """Plans of the numbered tasks. Domains are uniform and distinct, images uniform inside their domain.

    Tasks of equal seed and number draw alike, whatever their domains, unless their `stream` differs; training has 0.
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
