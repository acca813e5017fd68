"""What the README and the documentation say runs, leads somewhere and names what exists."""

import re
import runpy
from pathlib import Path

import jax
import numpy as np
import pytest
from PIL import Image

from cxda_jax.config import read, variant
from cxda_jax.disk import models
from cxda_jax.experiment import METHODS, build
from cxda_jax.fields import FIELDS
from cxda_jax.study import identity

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
DOCS = sorted([*(ROOT / "docs").glob("*.md"), ROOT / "docs" / "study" / "index.md"])
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *DOCS]
CODE = "".join(path.read_text() for part in ("launch", "cxda_jax") for path in (ROOT / part).rglob("*.py"))
COMMANDS = sorted({line for page in PAGES for line in re.findall(r"\bcxda [a-z]+ --[^`\n]+", page.read_text())})


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


def test_the_first_page_is_short_and_prints_what_it_says(capsys):
    (code,), (expected,) = blocks(README, "python"), blocks(README, "")
    execute(code)
    assert capsys.readouterr().out == expected
    assert len(README.splitlines()) <= 110


def test_the_gate_finds_the_two_commands():
    commands = [block.strip() for block in blocks(README, "bash")]
    assert len(commands) == 2 and all(c.startswith("python3 -m venv") and "\n" not in c for c in commands)
    assert "launch.train" in commands[0] and commands[1].endswith("/python -m pytest")


def test_a_trained_run_is_used_as_the_api_page_says(data_dir, tmp_path, monkeypatch):
    config = read("glyphs:cxda,smoke")
    config["data"] |= {"writers": [5, 5, 5], "drawings": 41}
    experiment, run = build(config, data_dir), tmp_path / "runs" / "glyphs" / "cxda" / "0"
    run.mkdir(parents=True)
    record = identity.claim(run, config, experiment.store)
    method, example, key = experiment.method, experiment.example, jax.random.key(0)
    variables = method.init(jax.random.key(7), example)
    models.write_model(run / "model", variables, config, {}, record._asdict())
    (tmp_path / ".cache").mkdir()
    (tmp_path / ".cache" / "cxda_jax").symlink_to(data_dir)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (code,) = blocks((ROOT / "docs" / "api.md").read_text(), "python")
    logits = method.predict(method.adapt(variables, example, key), example)
    np.testing.assert_allclose(execute(code)["logits"], logits, atol=1e-5)


def test_the_page_on_own_images_runs_and_has_the_cards_gain(tmp_path, monkeypatch, capsys):
    page = (ROOT / "docs" / "device.md").read_text()
    rng = np.random.default_rng(0)
    for folder in ("MY_PHOTOS", "NEW_PHOTOS"):
        (tmp_path / folder).mkdir()
        for i in range(3):
            Image.fromarray(rng.integers(0, 256, (30, 20), np.uint8)).save(tmp_path / folder / f"{i}.png")
    monkeypatch.chdir(tmp_path)
    (code,) = blocks(page, "python")
    names = execute(code)
    assert len(names["buffer"]) == 3 and names["weights"].shape == (3, 8, 3)
    assert set(names["after"].names) <= set(names["model"].card.class_names)
    assert "\n".join(models.gain_in_words(names["model"].card.gain)[2:]) in page


def test_the_config_page_shows_a_config():
    (code,) = blocks((ROOT / "docs" / "config.md").read_text(), "python")
    made = execute(code)["get_config"]("bn,smoke")
    assert (made.method, made.smoke, made.data.name) == ("bn", True, "folder") and set(made) == set(FIELDS)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page):
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if link.startswith("https://"):
            continue
        name, _, anchor = link.partition("#")
        target = page.parent / name if name else page
        assert target.exists(), f"{page.name}: {link}"
        assert not anchor or anchor in anchors(target), f"{page.name}: {link}"


def test_each_page_is_in_the_menu():
    menu = re.findall(r"^  - \w+: ([\w/]+\.md)$", (ROOT / "mkdocs.yml").read_text(), re.M)
    assert sorted(menu) == sorted(str(page.relative_to(ROOT / "docs")) for page in DOCS)


def test_each_marker_is_filled():
    hooks = runpy.run_path(str(ROOT / "docs" / "hooks.py"))
    filled = {
        str(page.relative_to(ROOT / "docs")): hooks["on_page_markdown"](page.read_text(), page=None) for page in DOCS
    }
    assert "| optimizer.learning_rate | `0.01` |" in filled["config.md"]
    assert "(methods.md#adding-a-method)" in filled["contributing.md"] and "## 0.1.0" in filled["changelog.md"]
    assert not [name for name, text in filled.items() for marker in hooks["TEXTS"] if marker in text]


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
            assert field in FIELDS[group].fields if field and group != "data" else group in FIELDS
        else:
            off = flag.removeprefix("no")  # --noopen is --open=false
            assert re.search(rf'DEFINE_\w+\(\s*"{flag}"|DEFINE_bool\(\s*"{off}"', CODE), flag
