"""Feed-forward latent domain adaptation in JAX: adapt to unlabelled images of unknown domains without back-propagation."""

from cxda_jax.data.episodes import EpisodeSpec, Plan, sample_plans
from cxda_jax.data.store import DomainStore, open_store, write_store
from cxda_jax.evaluate import evaluate
from cxda_jax.methods.cml import cml
from cxda_jax.methods.cotta import cotta
from cxda_jax.methods.cxda import cxda, cxda_loo, cxda_p2p, cxda_supervised
from cxda_jax.methods.erm import bn, erm, erm_iid
from cxda_jax.methods.finetune import FineTuning, ft_em, ft_im, sf_ocda
from cxda_jax.methods.sla import sla
from cxda_jax.types import Episode, Images, Method, UserError
from cxda_jax.version import VERSION as __version__

__all__ = [
    "DomainStore", "Episode", "EpisodeSpec", "FineTuning", "Images", "Method", "Plan", "UserError", "__version__", "bn",
    "cml", "cotta", "cxda", "cxda_loo", "cxda_p2p", "cxda_supervised", "erm", "erm_iid", "evaluate", "ft_em", "ft_im",
    "open_store", "sample_plans", "sf_ocda", "sla", "write_store",
]  # fmt: skip
