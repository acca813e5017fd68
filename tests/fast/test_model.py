"""A model that is asked for many images: it answers some at a time, of any method, here of a made-up one."""

import numpy as np

from cxda_jax.device import model as device
from tests.nets import CARD, build_method


def test_each_image_keeps_its_domain_however_many_are_asked_for(monkeypatch):
    """The answers are the domains themselves, so that they show which one a program was given with which image."""
    monkeypatch.setattr(device, "jnp", np)  # which compiles nothing
    classes = len(CARD.class_names)
    programs = device.CompiledMethod(lambda *_: None, lambda _, images: np.eye(classes)[images.domain], None)
    model = device.Model(CARD, build_method("cxda_supervised"), {}, programs, _adapted=())
    domains = np.random.default_rng(0).integers(0, classes, 2 * device.AT_ONCE + 3)
    answers = model.predict(np.zeros((len(domains), *CARD.shape), np.uint8), domains)
    np.testing.assert_array_equal([CARD.class_names.index(name) for name in answers.names], domains)
