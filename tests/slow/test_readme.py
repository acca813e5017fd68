"""What the README and the documentation say runs, leads somewhere and names what exists."""

import inspect
import json
import re

import numpy as np
import pytest

import cxda_jax
from cxda_jax.config.reading import read, variant
from cxda_jax.config.registry import METHODS, schema
from cxda_jax.disk import checkpoints, models
from tests.lines import ROOT
from tests.raw_fixtures import write_images

DOCS = sorted((ROOT / "docs").glob("*.md"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", ROOT / "SECURITY.md", *DOCS]
CODE = "".join(path.read_text() for part in ("launch", "cxda_jax") for path in (ROOT / part).rglob("*.py"))
NOW = [page for page in PAGES if page.name != "CHANGELOG.md"]  # which tells of commands that are gone
COMMANDS = sorted({line for page in NOW for line in re.findall(r"\bcxda [a-z]+ --[^`\n]+", page.read_text())})


def blocks(text, language):
    return [code for name, code in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.S | re.M) if name == language]


def execute(code):
    names = {"__name__": "page"}
    exec(compile(code, "page", "exec"), names)
    return names


def anchors(path):
    """Of a page's headings, as mkdocs and GitHub name them."""
    headings = re.findall(r"^#+ (.+)$", path.read_text(), re.M)
    return {re.sub(r"\s", "-", re.sub(r"[^\w\s-]", "", heading).lower()) for heading in headings}


def test_the_notebook_begins_with_the_packages_own_model(capsys):
    notebook = json.loads(
        (ROOT / "docs" / "examples" / "photographs.ipynb").read_text()
    )  # test_adapter_fit.py runs the rest
    (cell,) = (cell for cell in notebook["cells"] if "own model" in cell["metadata"].get("tags", ()))
    execute("".join(cell["source"]))
    assert capsys.readouterr().out == "".join(cell["outputs"][0]["text"])


def test_a_trained_run_is_used_as_the_api_page_says(smoke, tmp_path, monkeypatch):
    for place, target in (("runs/glyphs/cxda/0", "run"), (".cache/cxda_jax", "data")):
        (tmp_path / place).parent.mkdir(parents=True)
        (tmp_path / place).symlink_to(smoke[0] / target)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks((ROOT / "docs" / "api.md").read_text(), "python")
    names, result = execute(code), json.loads((smoke[0] / "run" / "result.json").read_text())
    assert checkpoints.weights_hash(names["variables"]) == result["weights_hash"]
    store, example = names["experiment"].store, names["experiment"].example
    assert names["logits"].shape == (len(example.pixels), len(store.info.class_names))
    assert np.isfinite(names["logits"]).all()


def test_the_api_page_shows_the_signatures():
    page = (ROOT / "docs" / "api.md").read_text().split("## Public names")[1].split("\n::: ")[0]
    shown = re.findall(r"`([A-Z_a-z0-9.]+)\(([^`]*)\)`", page)
    names = {name: getattr(cxda_jax, name) for name in cxda_jax.__all__}
    classes = {name: of for name, of in names.items() if isinstance(of, type)}
    names |= {f"{name}.{part}": x for name, of in classes.items() for part, x in vars(of).items()}
    assert {*cxda_jax.__all__} - {"__version__", "Answers", "Model", "Method"} <= {name for name, _ in shown} | {
        *classes
    }
    for name, of in names.items():
        told = [" ".join(inside.split()) for shown_name, inside in shown if shown_name == name]
        if told and not ("**options" in told[0] or "=..." in told[0]):
            taken = inspect.signature(getattr(of, "__func__", of)).parameters.values()
            given = [str(p.replace(annotation=p.empty)) for p in taken if p.name not in ("self", "cls")]
            assert ", ".join(given).replace(str(print), "print") in told, name  # an estimator's fit() is shown too


def test_the_page_on_own_images_runs_and_has_the_cards_gain(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "device.md").read_text()
    for folder in ("DEVICE", "NEW"):
        write_images(tmp_path / folder, 11, 0)  # of which three end in .png
    monkeypatch.chdir(tmp_path)
    names = execute("\n".join(blocks(page, "python")))
    assert len(names["buffer"]) == 6 and names["weights"].shape == (3, 4, 3)
    assert set(names["after"].names) <= set(names["model"].card.class_names)
    assert "\n".join(models.gain_in_words(names["model"].card.gain)[2:]) in page


def test_links_lead_somewhere():
    for page in PAGES:
        for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
            name, _, anchor = link.partition("#")
            target = page.parent / name if name else page
            if not link.startswith("https://"):
                assert target.exists() and (not anchor or anchor in anchors(target)), (page, link)


@pytest.mark.parametrize("command", COMMANDS)
def test_commands_name_what_exists(command):
    assert (ROOT / "launch" / f"{command.split()[1]}.py").exists()
    for flag, value in re.findall(r"--([\w.]+)(?:=('[^']*'|\S+))?", command):
        if flag == "config":
            name, _, argument = value.partition(":")
            method = variant(argument)[0]
            assert method in METHODS or method.startswith("$")
            assert read(f"{name}:cxda")["benchmark"] == name
        elif flag.startswith("config."):
            group, _, field = flag.removeprefix("config.").partition(".")
            assert field in schema()[group].fields if field and group != "data" else group in schema()
        else:
            off = flag.removeprefix("no")  # --noopen is --open=false
            assert re.search(rf'DEFINE_\w+\(\s*"{flag}"|DEFINE_bool\(\s*"{off}"', CODE), flag
