"""The web page of a model without a browser: its engine in Node.js, its drawings, its bytes, what is refused."""

import shutil
import subprocess
from pathlib import Path

import pytest

import cxda_jax
from cxda_jax.device.model import Model
from cxda_jax.disk import safetensors
from cxda_jax.errors import UserError
from cxda_jax.export import web

ROOT = Path(__file__).parents[2]


def render(model: Model, folder: Path) -> Path:
    """The page of a model, as if somebody had compared it."""
    page = folder / "index.html"
    page.write_text(web.render(web.describe(model), safetensors.named(model.variables), checked=True))
    return page


def test_the_page_of_the_documentation_is_the_shipped_models(tmp_path):
    """Where this fails, write it again; docs/live.md says how."""
    page = ROOT / "docs" / "live" / "unipen" / "index.html"
    made = render(cxda_jax.load("unipen"), tmp_path).read_text()
    assert page.read_text() == made, f"{page} is older than the model or than cxda_jax/export/"


@pytest.mark.skipif(not shutil.which("wat2wasm"), reason="no wat2wasm: apt-get install wabt")
def test_the_kernels_bytes_are_those_of_its_text(tmp_path):
    """Where this fails, make them again: wat2wasm kernel.wat."""
    subprocess.run(["wat2wasm", web.LIVE / "kernel.wat", "-o", tmp_path / "it"], check=True)
    assert (tmp_path / "it").read_bytes() == (web.LIVE / "kernel.wasm").read_bytes()


def test_without_node_nothing_is_claimed(tmp_path, monkeypatch):
    monkeypatch.setattr(web.shutil, "which", lambda name: None)
    model = cxda_jax.load("unipen")
    with pytest.raises(UserError, match="node is missing.*install"):
        web.write(model, tmp_path / "live")
    assert not (tmp_path / "live").exists()
    assert web.write(model, tmp_path / "live", check=False)["compared"] is False
    assert '"checked":false' in (tmp_path / "live" / "index.html").read_text()


def test_what_the_page_cannot_run_is_refused_by_name(tmp_path):
    model = cxda_jax.load("unipen")
    card, config = model.card, model.config
    cotta, resnet = model.method._replace(name="cotta"), {**config, "net": {**config["net"], "name": "resnet"}}
    for changed, method, changed_config, said in (
        (card, cotta, config, "method 'cotta' does not run in the page; choose a model of"),
        (card, model.method, resnet, "network 'resnet' does not run"),
        (card._replace(shape=(32, 32, 3)), model.method, config, "the model's are 32x32x3"),
    ):
        with pytest.raises(UserError, match=said):
            web.write(Model(changed, method, model.variables, model.programs, config=changed_config), tmp_path / "live")
    assert not (tmp_path / "live").exists()
