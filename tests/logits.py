"""What a made-up classifier says of images, for tests of fit() and of what it gives."""

from types import SimpleNamespace

import numpy as np
import pytest

from cxda_jax.adapter import diagnosis, fit, judge, settling
from tests.conftest import fully_compiled

CLASSES, STYLE, RNG = 6, 8, np.random.default_rng(7)


def made(seed=0, domains=24, each=130, strength=2.0):
    """Logits of a classifier that is sure of itself and errs in each domain in another way, labels, domains, styles."""
    rng = np.random.default_rng(seed)
    labels, owner = rng.integers(0, CLASSES, domains * each), np.repeat(np.arange(domains), each)
    logits = strength * np.eye(CLASSES)[labels] + rng.normal(0, 1.2, (len(labels), CLASSES))
    styles = rng.normal(0, 1, (domains, STYLE))
    logits += 0.8 * (styles[:, :CLASSES])[owner]  # its bias follows from the style
    return 3 * logits, labels, owner, styles[owner] + rng.normal(0, 0.3, (len(labels), STYLE))


@pytest.fixture(scope="module", autouse=True)
def fewer_tasks():
    """Judging takes more time than training, and both take more than compiling them."""
    with pytest.MonkeyPatch.context() as patch, fully_compiled():
        for module in (judge, fit):
            patch.setattr(module, "TASKS", 60)
        patch.setattr(diagnosis, "BLOCK", 20)
        patch.setattr(settling, "ASKED", 6)
        yield


@pytest.fixture(scope="module")
def new():
    """Images of other domains."""
    return SimpleNamespace(**dict(zip(("logits", "labels", "domains", "style"), made(seed=1), strict=True)))
