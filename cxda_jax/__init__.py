"""Feed-forward latent domain adaptation in JAX: adapt to unlabelled images of unknown domains without back-propagation."""

from cxda_jax.data.episodes import EpisodeSpec, Plan, sample_plans
from cxda_jax.data.store import DomainStore, open_store, write_store
from cxda_jax.evaluate import evaluate
from cxda_jax.methods.cxda import cxda, cxda_p2p, cxda_supervised
from cxda_jax.methods.erm import bn, erm
from cxda_jax.types import Episode, Images, Method, UserError
from cxda_jax.version import VERSION as __version__

__all__ = [
    "DomainStore", "Episode", "EpisodeSpec", "Images", "Method", "Plan", "UserError", "__version__", "bn", "cxda",
    "cxda_p2p", "cxda_supervised", "erm", "evaluate", "open_store", "sample_plans", "write_store",
]  # fmt: skip
