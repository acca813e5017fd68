"""What the study says of domains, of kinds of shift and of attention, against numbers made by hand and closed forms."""

from itertools import product

import numpy as np
import pytest

from cxda_jax.data.store import DomainStore, StoreInfo
from docs.study import detail_tables, details, evidence, tables

HASH = "ab" * 32


def small_store(name, names, classes):
    """Two images a domain."""
    info = StoreInfo(name, tuple(classes), (0.5,), (0.5,))
    rows = 2 * len(names)
    return DomainStore(info, np.zeros((rows, 8, 8, 1), np.uint8), np.arange(rows, dtype=np.int32) % len(classes),
                       np.arange(0, rows + 1, 2), ("test",) * len(names), tuple(names), HASH)  # fmt: skip


def test_queries_are_grouped_by_the_kind_of_shift():
    store = small_store("cifar10_c", ("fog 1", "fog 5", "snow 5"), "ab")
    found = details.groups(store, np.array([[0, 1, 2]]), np.array([[0, 1, 1]]))
    assert {name: of.tolist() for name, of in found.items()} == {
        "severity 1": [[True, False, False]], "severity 5": [[False, True, True]],
    }  # fmt: skip
    letters = "cCoOsSab"
    store = small_store("unipen_sizes", ("apa One", "apb Two"), letters)
    found = details.groups(store, np.array([[0, 1, 1]]), np.array([[0, 6, 5]]))
    assert found["case by size"].tolist() == [[True, False, True]] and found["all others"].tolist() == [
        [False, True, False]
    ]


def test_domains_are_compared_with_a_network_that_does_not_adapt():
    domains = {"erm_iid": {"apa One": [5, 10], "apa Two": [20, 30], "kai Three": [0, 5]},
               "icrm": {"apa One": [4, 10], "apa Two": [26, 30], "kai Three": [0, 5]}}  # fmt: skip
    told = {"methods": {label: {"domains": of} for label, of in domains.items()}}
    studies = {"unipen": evidence.Evidence("unipen", {}, {}, told)}
    writers = {"apa One": -10.0, "apa Two": 20.0, "kai Three": 0.0}
    assert detail_tables.domain_gaps(studies["unipen"])["icrm"] == pytest.approx(writers)
    assert detail_tables.domain_gaps(studies["unipen"], whole=False)["icrm"] == pytest.approx({"apa": 12.5, "kai": 0})
    # A later file adds what the first one lacks, and changes nothing.
    evidence.fill(
        told, {"methods": {"icrm": {"domains": {"apa One": [9, 10]}, "attention": {"own_domain": [0.2, 0.1, 0.3]}}}}
    )
    assert told["methods"]["icrm"] == {"domains": domains["icrm"], "attention": {"own_domain": [0.2, 0.1, 0.3]}}
    lines = detail_tables.domains(studies).splitlines()
    assert lines[2:] == [
        f"| `unipen`, 3 writers |  | 1 (-10 to +20); {over_all_draws([(-1, 10), (6, 30), (0, 5)])} |  |  |  |",
        f"| `unipen`, 2 sites |  | 1 (+0 to +12); {over_all_draws([(5, 40), (0, 5)])} |  |  |  |",
    ]


def over_all_draws(counts):
    """The mean, and the interval over all ways to draw as many domains again."""
    means = [100 * sum(m for m, _ in of) / sum(n for _, n in of) for of in product(counts, repeat=len(counts))]
    mean = 100 * sum(m for m, _ in counts) / sum(n for _, n in counts)
    return tables.signed((mean, *np.percentile(means, [2.5, 97.5], method="inverted_cdf")))


def test_attention_is_measured_as_the_closed_forms_say():
    support = np.arange(10)  # of five domains, in the order of the store
    kept = {
        "support_domain": np.tile(support // 2, (3, 1)),
        "query_domain": np.tile([0, 4], (3, 1)),
        "weights": np.full((3, 2, 4, 10), 0.05, np.float16),
    }
    labels = support % 2
    stored = {
        "support": np.tile(support, (3, 1)),
        "labels": np.tile([0, 1], (3, 1)),
        "predictions": np.tile([0, 1], (3, 1)),
    }
    even = details.attention(kept, stored, labels, None)
    assert even["on_images"][0] == pytest.approx(0.5, abs=1e-3) and even["effective_images"][0] == pytest.approx(
        10, abs=1e-3
    )
    assert even["own_domain"][0] == pytest.approx(even["own_domain_chance"]) == pytest.approx(0.2)
    assert even["same_class"][0] == pytest.approx(even["same_class_chance"]) == pytest.approx(0.5)
    own = (kept["query_domain"][:, :, None] == kept["support_domain"][:, None])[:, :, None]
    kept["weights"] = np.where(own, 0.5, 0.0).repeat(4, 2)
    before = np.array([[0, 0], [1, 1], [1, 0]])
    found = details.attention(kept, stored, labels, before)
    assert found["own_domain"] == pytest.approx([1, 1, 1]) and found["effective_images"][0] == pytest.approx(2)
    assert found["gain_correlation"]["own_domain"] == [0, 0, 0], "what never differs correlates with nothing"
    x, y = np.random.default_rng(0).normal(size=(2, 40, 20))
    r, low, high = details.correlation(x, x + y)
    assert low < 0.5**0.5 < high and r == pytest.approx(np.corrcoef(x.ravel(), (x + y).ravel())[0, 1])
