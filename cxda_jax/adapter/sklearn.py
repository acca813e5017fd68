"""Any classifier of scikit-learn with adaptation: CXDAClassifier(base_estimator).fit(X, y, sample_domain).adapt(new_X).

scikit-learn is imported when CXDAClassifier is first asked for.
"""

import warnings
from typing import Any

import numpy as np

from cxda_jax.adapter.adapter import as_array
from cxda_jax.adapter.fit import MINUTES, STEPS, domains_of, fit
from cxda_jax.errors import UserError, needing

LEAST = 1e-12  # of probabilities whose logarithm is taken
UNTRUSTED = (
    "the adapter is not trusted, so the classifier was trained again on all domains and adapt() changes nothing; "
    "print(model.adapter_) says why"
)


class Adapting:
    """A classifier that adapts to unlabelled rows of a new domain. The rows themselves are the style.

    It is trained on a part of the domains, and the adapter on the others. If the adapter is not trusted, fit() warns
    and trains the classifier again, on all domains; adapt() then changes nothing.

    Args:
      base_estimator: any classifier with predict_log_proba() or decision_function(); None: logistic regression.
      held_out: the part of the domains that it is not trained on and the adapter is, three domains at least.
      minutes: see cxda_jax.fit().
      steps: see cxda_jax.fit().
      floor: see cxda_jax.fit().
      random_state: as scikit-learn has it.
    """

    def __init__(self, base_estimator=None, held_out=0.5, minutes=MINUTES, steps=STEPS, floor=None, random_state=None):
        self.base_estimator = base_estimator
        self.held_out = held_out
        self.minutes = minutes
        self.steps = steps
        self.floor = floor
        self.random_state = random_state

    def fit(self, X: Any, y: Any, sample_domain: Any = None) -> "Adapting":
        """Trains the classifier, and an adapter where `sample_domain` has the domain of each row."""
        from sklearn.base import clone
        from sklearn.linear_model import LogisticRegression
        from sklearn.utils import check_random_state
        from sklearn.utils.multiclass import check_classification_targets
        from sklearn.utils.validation import validate_data

        X, y = validate_data(self, X, y)
        check_classification_targets(y)
        self.classes_, numbers = np.unique(y, return_inverse=True)
        seed = int(check_random_state(self.random_state).randint(2**31 - 1))
        held, domains = np.zeros(len(y), bool), np.zeros(0)
        if sample_domain is not None:
            names, domains = domains_of("sample_domain", as_array("sample_domain", sample_domain))
            count = max(3, round(self.held_out * len(names)))
            if domains.shape != y.shape or count >= len(names):
                what = f"shape {np.shape(sample_domain)} with {len(names)} domains"
                raise UserError(f"sample_domain: {what}; give that of each row, and four domains at least")
            held = np.isin(domains, np.random.default_rng(seed).permutation(len(names))[:count])
        base: Any = LogisticRegression() if self.base_estimator is None else clone(self.base_estimator)
        self.base_, self.adapter_, self.device_ = base.fit(X[~held], y[~held]), None, None
        if sample_domain is not None:
            told = {name: getattr(self, name) for name in ("minutes", "steps", "floor")}
            told |= {"seed": seed, "log": lambda line: None}
            self.adapter_ = fit(self._logits(X[held]), numbers[held], domains[held], X[held], **told)
            if not self.adapter_.helps:
                self.base_ = base.fit(X, y)
                warnings.warn(UNTRUSTED, UserWarning, stacklevel=2)
        return self

    def adapt(self, X: Any) -> "Adapting":
        """Takes these unlabelled rows for the buffer of predict(), in place of earlier ones."""
        X = self._checked(X)
        if self.adapter_ is None:
            raise UserError("sample_domain: fit() had none, so there is no adapter; give fit() the domain of each row")
        if self.adapter_.helps:
            self.device_ = self.adapter_.adapt(self._logits(X), X)
        return self

    def predict_proba(self, X: Any) -> np.ndarray:
        """The probabilities of the classes_; before adapt() those of an empty buffer."""
        X = self._checked(X)
        logits = self._logits(X)
        if self.adapter_ is None or not self.adapter_.helps:
            e = np.exp(logits - logits.max(1, keepdims=True))
            return e / e.sum(1, keepdims=True)
        device = self.device_ or self.adapter_.adapt(logits[:0], X[:0])
        return device.predict_proba(logits, X)

    def predict(self, X: Any) -> np.ndarray:
        numbers = self.predict_proba(X).argmax(1)  # first: it says where nothing was fitted
        return self.classes_[numbers]

    def _checked(self, X: Any) -> np.ndarray:
        from sklearn.utils.validation import check_is_fitted, validate_data

        check_is_fitted(self)
        checked: Any = validate_data(self, X, reset=False)
        return checked

    def _logits(self, X: np.ndarray) -> np.ndarray:
        """What the classifier says of rows, with a column for each of classes_."""
        if hasattr(self.base_, "predict_log_proba"):
            found = np.maximum(self.base_.predict_log_proba(X), np.log(LEAST))
        else:
            found = self.base_.decision_function(X)
            found = np.stack([-found / 2, found / 2], axis=1) if found.ndim == 1 else found
        logits = np.full((len(X), len(self.classes_)), min(np.log(LEAST), found.min(initial=0.0)))
        logits[:, np.searchsorted(self.classes_, self.base_.classes_)] = found
        return logits


def __getattr__(name: str) -> Any:
    if name != "CXDAClassifier":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with needing(name, "sklearn"):
        from sklearn.base import BaseEstimator, ClassifierMixin

    about = {"__module__": __name__, "__doc__": Adapting.__doc__}
    return globals().setdefault(name, type(name, (Adapting, ClassifierMixin, BaseEstimator), about))
