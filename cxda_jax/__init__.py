"""Feed-forward latent domain adaptation in JAX: adapt to unlabelled images of
unknown domains without back-propagation."""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from cxda_jax.version import VERSION as __version__

if TYPE_CHECKING:
    from cxda_jax.adapter.adapter import Adapter, load_adapter
    from cxda_jax.adapter.device import Device
    from cxda_jax.adapter.fit import fit
    from cxda_jax.adapter.sklearn import CXDAClassifier
    from cxda_jax.adapter.torch_models import TorchEncoder
    from cxda_jax.data.episodes import Draw, EpisodeSpec, Plan, sample_plans
    from cxda_jax.data.store import DomainStore, open_store, write_store
    from cxda_jax.device.buffer import SupportBuffer
    from cxda_jax.device.loading import load
    from cxda_jax.device.model import Answers, Model
    from cxda_jax.errors import UserError
    from cxda_jax.machine.backend import keep_compiled
    from cxda_jax.methods.anytime import cxda_any
    from cxda_jax.methods.cml import cml
    from cxda_jax.methods.cotta import cotta
    from cxda_jax.methods.cxda import cxda, cxda_loo, cxda_p2p, cxda_supervised
    from cxda_jax.methods.cxda_shares import cxda_shares
    from cxda_jax.methods.erm import bn, bn_alpha, erm, erm_iid
    from cxda_jax.methods.finetune import FineTuning, ft_em, ft_im, sf_ocda
    from cxda_jax.methods.icrm import icrm, with_transformer
    from cxda_jax.methods.label_shift import bbse, mlls, prior_shift
    from cxda_jax.methods.sla import sla
    from cxda_jax.methods.stata import stata
    from cxda_jax.methods.training_free import feature_shift, lame, t3a
    from cxda_jax.methods.unmix import unmix
    from cxda_jax.training.evaluation import evaluate
    from cxda_jax.types import Episode, Images, Method

# Where each name lives. It is imported when it is first used: --help of a command must not wait for JAX.
_HOMES = {
    "data.episodes": ("Draw", "EpisodeSpec", "Plan", "sample_plans"),
    "data.store": ("DomainStore", "open_store", "write_store"),
    "device.buffer": ("SupportBuffer",),
    "device.loading": ("load",),
    "device.model": ("Answers", "Model"),
    "errors": ("UserError",),
    "machine.backend": ("keep_compiled",),
    "adapter.sklearn": ("CXDAClassifier",),
    "training.evaluation": ("evaluate",),
    "adapter.adapter": ("Adapter", "load_adapter"),
    "adapter.device": ("Device",),
    "adapter.fit": ("fit",),
    "adapter.torch_models": ("TorchEncoder",),
    "methods.anytime": ("cxda_any",),
    "methods.cml": ("cml",),
    "methods.cotta": ("cotta",),
    "methods.cxda_shares": ("cxda_shares",),
    "methods.cxda": ("cxda", "cxda_loo", "cxda_p2p", "cxda_supervised"),
    "methods.erm": ("bn", "bn_alpha", "erm", "erm_iid"),
    "methods.finetune": ("FineTuning", "ft_em", "ft_im", "sf_ocda"),
    "methods.training_free": ("feature_shift", "lame", "t3a"),
    "methods.icrm": ("icrm", "with_transformer"),
    "methods.label_shift": ("bbse", "mlls", "prior_shift"),
    "methods.sla": ("sla",),
    "methods.stata": ("stata",),
    "methods.unmix": ("unmix",),
    "types": ("Episode", "Images", "Method"),
}
_HOME = {name: home for home, names in _HOMES.items() for name in names}

__all__ = [
    "Adapter", "Answers", "CXDAClassifier", "Device", "DomainStore", "Draw", "Episode", "EpisodeSpec", "FineTuning",
    "Images", "Method", "Model", "Plan", "SupportBuffer", "TorchEncoder", "UserError", "__version__", "bbse", "bn",
    "bn_alpha", "cml", "cotta", "cxda", "cxda_any", "cxda_loo", "cxda_p2p", "cxda_shares", "cxda_supervised", "erm",
    "erm_iid", "evaluate", "feature_shift", "fit", "ft_em", "ft_im", "icrm", "keep_compiled", "lame", "load",
    "load_adapter", "mlls", "open_store", "prior_shift", "sample_plans", "sf_ocda", "sla", "stata", "t3a", "unmix",
    "with_transformer", "write_store",
]  # fmt: skip


def __dir__() -> list[str]:
    return [*globals(), *_HOME]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
