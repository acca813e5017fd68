"""Gives a model from its files alone."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

from cxda_jax.adapter.adapter import is_adapter
from cxda_jax.config.reading import check_stored, of_method
from cxda_jax.data.store import DomainStore, StoreInfo, fault_of_images
from cxda_jax.device.attached import attach
from cxda_jax.device.model import CompiledMethod, Model
from cxda_jax.disk import folders, models
from cxda_jax.disk.reading import read_object
from cxda_jax.errors import UserError, brief
from cxda_jax.machine import backend
from cxda_jax.training.experiment import build_method
from cxda_jax.types import Images

SHIPPED = Path(__file__).with_name("shipped")  # models that come with the package


def load(path: str | Path, method: str = "", encoder: str = "") -> Model:
    """A trained model, or a classifier that you have with its adapter.

    Args:
      path: the model/ of a run, or a run; the name of a model that comes with the package, such as "glyphs"; or the
        folder of an adapter.
      method: how to adapt, for a model of erm or erm_iid: t3a, lame, bn_alpha, feature_shift, ft_em and the
        like. The model's own method unless given.
      encoder: for an adapter: the classifier, as cxda features takes it. "": images are rows of logits and style.
    """
    folder = find_model(path)
    if is_adapter(folder):
        if method:
            raise UserError(f"method={method!r}: {folder} is an adapter, which has its own; leave it out")
        return attach(folder, encoder)
    if encoder:
        raise UserError(f"encoder={brief(encoder)}: {folder} is a model with a network of its own; leave it out")
    return folders.read(folder, lambda where: _trained(where, method))


def _trained(folder: Path, method: str) -> Model:
    card = models.read_card(folder)
    if fault := fault_of_images(card._asdict()):
        raise UserError(f"{folder}/{models.CARD}: {fault}; {models.AGAIN}")
    where = f"{folder}/{models.CONFIG}"
    config = check_stored(read_object(folder / models.CONFIG, models.AGAIN), f"{where}: config", models.AGAIN)
    name = method or card.method
    built = build_method(of_method(config, name), as_store(card))
    if name != card.method and card.method not in (built.trains_as, f"{built.trains_as}_iid"):
        raise UserError(
            f"method={name!r}: {folder} was trained as {card.method}, from which it cannot start; "
            f"give a model of {built.trains_as}"
        )
    like = jax.eval_shape(built.init, jax.random.key(0), Images(jnp.zeros((2, *card.shape)), jnp.zeros(2, jnp.int32)))
    variables, _ = models.read_model(folder, like)
    if built.calibrate:
        known = models.read_calibration(folder, name)
        if not known:
            raise UserError(f"method={name!r}: {folder} lacks what it needs to know of the training images")
        variables = {**variables, "calibration": jax.tree.map(jnp.asarray, known)}
    attention = backend.jit(built.attention) if built.attention else None
    programs = CompiledMethod(backend.jit(built.adapt), backend.jit(built.predict), attention)
    return Model(card, built, variables, programs, config)


def find_model(path: str | Path) -> Path:
    """The folder of a model's files."""
    given = Path(path)
    shipped = {folder.name: folder for folder in sorted(SHIPPED.glob("*")) if models.is_model(folder)}
    for folder in (given, given / "model", shipped.get(str(path), given)):
        if models.is_model(folder):
            return folder
    known = f"; {', '.join(shipped)} come with the package" * bool(shipped)
    what = "no model in it" if given.is_dir() else "no such folder"
    raise UserError(f"{brief(str(path), 80)}: {what}; give a run of cxda train, or its model/{known}")


def as_store(card: models.Card) -> DomainStore:
    """A store without images that has all that a method is built from."""
    info = StoreInfo(
        card.data, card.class_names, card.mean, card.std, card.metric, card.provenance, fit=card.fit,
        background=card.background, licence=card.licence,
    )  # fmt: skip
    nothing = np.zeros((0, *card.shape), np.uint8)
    return DomainStore(info, nothing, np.zeros(0, np.int32), np.zeros(1, np.int64), (), (), card.data_hash)
