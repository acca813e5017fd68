"""The HTML report: what its bytes hold."""

import numpy as np
from matplotlib.figure import Figure

from cxda_jax.pages.figures import to_svg
from cxda_jax.pages.page import ExplorerTask, Page, Section, encode, figure_part, table_part
from tests.pages import HOSTILE, Elements, embedded, written

TABLE = """<table class="sortable"><caption>Accuracy of {0}</caption>
<thead><tr><th>Method</th><th>Average</th><th>Worst 10 %</th></tr></thead><tbody>
<tr><td>erm</td><td data-value="61.5">61.5 ± 0.2</td><td data-value="9.5">9.5</td></tr>
<tr><td>cotta</td><td>–</td><td data-value="">–</td></tr>
</tbody></table><p class="notes">Mean over three seeds. Every cell is the mean over the same 300 tasks.</p>"""


def make_task(seed=0, name="task 1", shape=(28, 28, 1), n=40, m=12, heads=4, mark="") -> ExplorerTask:
    rng = np.random.default_rng(seed)
    names = [f"domain {mark}{c}" for c in ("north", "south", "by the river in the evening", "east")]
    domains, labels = rng.integers(0, 4, n), rng.integers(0, 5, n + m)
    pixels = rng.integers(0, 90, (n + m, *shape), np.uint8)
    words, weights = tuple(f"class {mark}{label}" for label in labels), rng.dirichlet(np.full(n, 0.7), (m, heads))
    answers = {f"{method}{mark}": tuple(rng.permutation(words[n:])) for method in ("erm", "cml")}
    answers[f"cxda{mark}"] = words[n:]
    support = pixels[:n], tuple(names[d] for d in domains), words[:n]
    return ExplorerTask(name + mark, *support, pixels[n:], names[1], words[n:], answers, weights)


def make_figure(title="Accuracy", mark="") -> tuple[str, str, str]:
    plot = Figure(figsize=(6, 3.2), layout="constrained")
    axes = plot.subplots()
    axes.plot([1, 2, 3], [3, 1, 2], "o-", label="cxda")
    axes.set(xlabel="step", ylabel="accuracy in %", title=title)
    axes.legend()
    return title + mark, f"Accuracy on unseen domains after each step, over three seeds.{mark}", to_svg(plot)


def make_report(mark="") -> Page:
    tables = [table_part(i, TABLE.format(of)) for i, of in enumerate(("all methods", "two"), 1)]
    tasks = [make_task(mark=mark), make_task(1, "task 2", (112, 112, 3), n=20, m=5, heads=2)]
    return Page(
        title=f"Latent domain adaptation on glyphs{mark}",
        summary=[("Benchmarks", f"glyphs{mark}"), ("Methods", "erm, cotta, cml, cxda"), ("Seeds", "0, 1, 2")],
        faults=[f"runs/glyphs/cotta/2{mark}: no result.json; evaluate it: python -m launch.evaluate --runs=..."],
        sections=[Section("tables", "Tables", tables)],
        tasks=[*map(encode, tasks)],
        figures=[figure_part(1, *make_figure(mark=mark)), figure_part(2, *make_figure("Loss"))],
    )


def test_hostile_names_stay_text_and_what_is_not_there_has_no_section(tmp_path):
    found = Elements(page := written(tmp_path / "report.html", make_report(HOSTILE)))
    assert found.tags == Elements(written(tmp_path / "plain.html", make_report())).tags
    assert not any(name.startswith("on") for _, attributes in found.elements for name in attributes)
    for text in (f"glyphs{HOSTILE}", f"runs/glyphs/cotta/2{HOSTILE}", f"over three seeds.{HOSTILE}"):
        assert text in found.text
    policy = next(a["content"] for _, a in found.elements if a.get("http-equiv") == "Content-Security-Policy")
    assert "default-src 'none'" in policy and "img-src data:" in policy and "http" not in policy
    task = embedded(page)[0]
    assert task["name"] == f"task 1{HOSTILE}" and task["domains"][0] == f"domain {HOSTILE}south"
    page = written(tmp_path / "none.html", Page("Nothing \udcff", (), (), ()))
    assert not set(Elements(page).tags) & {"section", "table", "figure", "h2"} and embedded(page) == []
