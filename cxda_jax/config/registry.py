"""All methods, and all fields of configs, which follow from them.

Another package adds a method without a change here. An entry point in its pyproject.toml has the method's name:

    [project.entry-points."cxda_jax.methods"]
    counted_shares = "my_package.counted_shares:COUNTED_SHARES"
"""

from collections.abc import Collection

from cxda_jax.config.extensions import added
from cxda_jax.config.fields import FIELDS, Field, Group, lookup
from cxda_jax.methods import (
    anytime,
    cml,
    cotta,
    cxda,
    cxda_shares,
    erm,
    finetune,
    icrm,
    label_shift,
    sla,
    stata,
    training_free,
    unmix,
)
from cxda_jax.methods.entry import Entry

METHODS: dict[str, Entry] = {  # tables and figures have this order
    "erm": erm.ERM,
    "erm_iid": erm.ERM_IID,
    "cml": cml.CML,
    "bn": erm.BN,
    "bn_alpha": erm.BN_ALPHA,
    "cxda": cxda.CXDA,
    "cxda_loo": cxda.CXDA_LOO,
    "cxda_any": anytime.CXDA_ANY,
    "cxda_shares": cxda_shares.CXDA_SHARES,
    "cxda_p2p": cxda.CXDA_P2P,
    "cxda_supervised": cxda.CXDA_SUPERVISED,
    "icrm": icrm.ICRM,
    "ft_em": finetune.FT_EM,
    "ft_im": finetune.FT_IM,
    "sf_ocda": finetune.SF_OCDA,
    "cotta": cotta.COTTA,
    "sla": sla.SLA,
    "t3a": training_free.T3A,
    "lame": training_free.LAME,
    "feature_shift": training_free.FEATURE_SHIFT,
    "stata": stata.STATA,
    "prior_shift": label_shift.PRIOR_SHIFT,
    "mlls": label_shift.MLLS,
    "bbse": label_shift.BBSE,
    "unmix": unmix.UNMIX,
}
OWN = tuple(METHODS)  # without those of other packages
METHODS |= added("cxda_jax.methods", OWN, lambda entry: isinstance(entry, Entry))
STARTS = ("erm", "erm_iid")  # from whose checkpoints a method without a training of its own may start; the usual first


def groups() -> dict[str, Group]:
    """The groups of fields that some methods alone read."""
    return {name: group for entry in METHODS.values() for name, group in entry.groups.items()}


def schema() -> dict[str, Field | Group]:
    """All fields that a config may have."""
    return FIELDS | groups()


def readers(group: str) -> list[str]:
    """The methods that read a group of fields."""
    return [name for name, entry in METHODS.items() if group in entry.groups]


def held(method: str, for_tests: bool = False) -> Collection[str]:
    """The names in schema() of what a config of the method holds.

    With `for_tests`, a training that others start from has what their tests read too. What a method of another package
    reads is not among it, so that the training can be read where that package is missing.
    """
    own = lookup("method", method, METHODS).groups
    of_own = [item for name in OWN for item in METHODS[name].groups.items() if for_tests and method in STARTS]
    return {*FIELDS, *own, *(name for name, group in of_own if group.at_test)}
