"""The web page of a model without a browser: its engine in Node.js, its drawings, its bytes, what is refused."""

import hashlib
import json
import shutil
import subprocess
from collections.abc import Mapping

import numpy as np
import pytest

import cxda_jax
from cxda_jax.errors import UserError
from cxda_jax.export import web
from cxda_jax.export.pair import by_model
from tests.lines import ROOT
from tests.nets import random_model
from tests.pages import render


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


NODE = shutil.which("node")
needs_node = pytest.mark.skipif(not NODE, reason="no Node.js: apt-get install nodejs")
TOLERANCE = 1e-4


OTHERS: dict[str, tuple[str, Mapping]] = {
    "erm": ("erm", {}),
    "a share of the support's": ("bn", {"batch_norm__momentum": 0.3}),
    "padding": ("bn_alpha", {"net__padding": "same", "side": 17}),
    "two norms, usual scale": ("cxda", {"attention__shared_norm": False, "attention__scale": "head_dim"}),
    "statistics by a prior": ("cxda_loo", {"batch_norm__prior": 7.0}),
    "learned tokens": ("cxda_any", {}),
    "running statistics alone": ("cxda_any", {"cxda_any__running": True, "cxda_any__learned": 0}),
    "icrm of a short sequence": ("icrm", {"icrm__layers": 3, "icrm__width": 24, "icrm__heads": 3, "icrm__context": 3}),
    "shares of classes, by two of three maps": ("cxda_shares", {"cxda_shares__maps": 2, "cxda_shares__em_steps": 3}),
}


@pytest.mark.slow
@needs_node
@pytest.mark.parametrize("case", OTHERS)
def test_the_engine_answers_as_jax_does(case, tmp_path):
    """With WebAssembly and without. The shipped model and its 100 places follow with its page."""
    method, fields = OTHERS[case]
    model, fills = random_model(method, **fields), (0, 1, 5)
    coarse = np.random.default_rng(1).integers(0, 256, (11, 5, 5, 1), np.uint8)  # blocks: more than noise differs
    pixels = np.repeat(np.repeat(coarse, 8, 1), 8, 2)[:, : model.card.shape[0], : model.card.shape[1]]
    support, asked = pixels[:5], pixels[5:]
    answers = web.run(render(model, tmp_path), support, asked, fills)["answers"]
    assert set(answers) == {"WebAssembly", "plain JavaScript"}
    for place, fill in enumerate(fills):
        logits, weights = by_model(model, support[:fill], asked)
        assert np.ptp(logits, axis=0).max() > 1e-3 * np.abs(logits).max()  # queries differ
        for found in answers.values():
            given = np.array(found[place]["logits"])
            np.testing.assert_allclose(given, logits, atol=TOLERANCE * np.abs(logits).max())
            assert (given.argmax(1) == logits.argmax(1)).all()
            if weights is None:
                assert not any(found[place]["weights"])
            elif fill:
                np.testing.assert_allclose(np.array(found[place]["weights"]), weights, atol=TOLERANCE)


@pytest.mark.slow
@needs_node
def test_strokes_become_the_same_pixels_as_in_training(tmp_path):
    """Of all recorded drawings, and of odd ones; one of 255 is allowed, since the order of sums may differ."""
    hands = web.read_hands()
    assert len(hands) == 10 and {len(hand.drawings) for hand in hands} == {60}
    wild = [list(map(tuple, np.random.default_rng(2).uniform(0, 400, (n, 2)).round(3).tolist())) for n in (1, 2, 7, 30)]
    odd = [*([stroke] for stroke in wild), wild, [[(3, 3), (3, 3)]], [[(5, 5)], [(5, 9)]]]
    drawings, none = [*(d for hand in hands for d in hand.drawings), *odd], np.zeros((0, 28, 28, 1), np.uint8)
    page = render(cxda_jax.load("unipen"), tmp_path)
    found = web.run(page, none, none, [], drawings)["drawn"]
    given = np.stack([np.frombuffer(web.base64.b64decode(text), np.uint8).reshape(28, 28) for text in found])
    wanted = np.stack([web.drawn(drawing, 28) for drawing in drawings])
    assert (wanted < 128).any((1, 2)).all()
    assert np.abs(given.astype(int) - wanted).max() <= 1


@pytest.mark.slow
@needs_node
def test_a_page_is_written_with_its_parity_or_not_at_all(tmp_path, monkeypatch):
    model, live = cxda_jax.load("unipen"), tmp_path / "live"
    parity, page = web.write(model, live), live / "index.html"
    assert json.loads((live / "parity.json").read_text()) == json.loads(json.dumps(parity))
    assert parity["compared"] and parity["same_classes"] and parity["pixels"] <= 1 and parity["fills"][-1] == 100
    assert 0 < max(*parity["logits"].values(), parity["attention"]) <= TOLERANCE
    assert set(parity["logits"]) == {"WebAssembly", "plain JavaScript"}
    assert parity["bytes"] == page.stat().st_size < 1.5 * 2**20
    assert parity["sha256"] == hashlib.sha256(page.read_bytes()).hexdigest()
    assert all(told in page.read_text() for told in ("10.5281/zenodo.1195803", "CC BY 4.0"))
    known = web.describe(model)
    wrong = {**known, "share": {"momentum": 0.0, "prior": known["share"]["prior"] + 1}}
    monkeypatch.setattr(web, "describe", lambda model: wrong)
    with pytest.raises(UserError, match="JAX"):
        web.write(model, tmp_path / "no")
    assert not (tmp_path / "no").exists()
