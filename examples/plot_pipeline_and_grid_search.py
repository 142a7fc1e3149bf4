"""
A scikit-learn pipeline and a grid search
=========================================

The estimators follow the conventions of scikit-learn, so they work in pipelines and grid searches.
A search need not maximize accuracy. This one maximizes the share of held-out digits that are proved
to stay right.
"""

import matplotlib.pyplot as plt
import numpy as np
from sklearn.datasets import load_digits
from sklearn.model_selection import GridSearchCV, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

import otad

plt.style.use("otad.report.gallery")

# %%
# The first step turns rows of 64 numbers from 0 to 16 into images from 0 to 1.
X, y = load_digits(return_X_y=True)
X_train, X_test, y_train, y_test = train_test_split(
    X, y, train_size=400, test_size=200, random_state=0
)


def as_images(rows):
    return rows.reshape(-1, 1, 8, 8) / 16


pipe = make_pipeline(
    FunctionTransformer(as_images), otad.OTADClassifier(epochs=6, n_blocks=3, random_state=0)
)


# %%
# This function is the score. The last step of the pipeline makes the certificates, so it gets
# images.
def proved(pipe, X, y, eps=0.5):
    """The share of rows that are right, and proved to stay so within l2 distance eps."""
    certificate = pipe[-1].certify(pipe[:-1].transform(X))
    right = pipe.classes_[certificate.prediction] == y
    return np.mean(right & (certificate.radius.numpy() > eps))


# %%
# The grid has numbers of neighbors and weights of the transport energy. It uses training data
# alone, and the model with the largest proved share is fitted again. With fewer neighbors more is
# proved, because fewer training points have to agree.
search = GridSearchCV(
    pipe,
    {"otadclassifier__n_neighbors": [1, 3, 10], "otadclassifier__energy_weight": [0.05, 0.2]},
    scoring={"accuracy": "accuracy", "proved": proved},
    refit="proved",
    cv=2,
).fit(X_train, y_train)
print(search.best_params_)
shares = {}
for name, model in {"before": pipe.fit(X_train, y_train), "chosen": search.best_estimator_}.items():
    shares[name] = proved(model, X_test, y_test)
    right = model.score(X_test, y_test)
    print(f"{name}: {right:.1%} right on test digits, {shares[name]:.1%} proved at l2 0.5")
gain = shares["chosen"] - shares["before"]
print(f"gain of the search in proved test digits: {100 * gain:+.1f} points")

# %%
# The pictures show both scores over the grid.
figure, panels = plt.subplots(1, 2, figsize=(9.6, 2.6))
for panel, score in zip(panels, ("accuracy", "proved"), strict=True):
    table = 100 * search.cv_results_[f"mean_test_{score}"].reshape(2, 3)  # weights by neighbors
    panel.imshow(table, aspect="auto", cmap="BuGn", vmin=0, vmax=130)
    for (i, j), value in np.ndenumerate(table):
        panel.text(j, i, f"{value:.1f}", ha="center", va="center")
    panel.set_xticks(range(3), ["K = 1", "K = 3", "K = 10"])
    panel.set_yticks(range(2), ["energy 0.05", "energy 0.2"])
    panel.set_title(f"{score}, percent of held-out digits")
    panel.grid(False)
