"""Gradient boosting of scikit-learn, with its defaults, on the folds of the recipe `tabular`."""

import json
from statistics import mean

from sklearn.ensemble import GradientBoostingClassifier, GradientBoostingRegressor
from sklearn.linear_model import LogisticRegression, Ridge

from phasetrain.addons.libraries.scikit_learn import load_sklearn

FOLDS = 5
TABLES = {"breast_cancer": "accuracy", "wine": "accuracy", "diabetes": "r2"}


def score(data: str, classifier: type, regressor: type, **settings: int) -> float:
    """Return the mean over the folds of the accuracy, or of R2."""
    found = []
    for fold in range(FOLDS):
        train = load_sklearn(data, "train", FOLDS, fold)
        test = load_sklearn(data, "test", FOLDS, fold)
        kind = regressor if TABLES[data] == "r2" else classifier
        model = kind(**settings).fit(train.inputs.numpy(), train.targets.numpy().squeeze())
        found.append(model.score(test.inputs.numpy(), test.targets.numpy().squeeze()))
    return mean(found)


def main() -> None:
    boosting: dict[str, float] = {}
    linear: dict[str, float] = {}
    for data, metric in TABLES.items():
        name = f"{data}: {metric}"
        boosting[name] = score(
            data, GradientBoostingClassifier, GradientBoostingRegressor, random_state=0
        )
        linear[name] = score(data, LogisticRegression, Ridge, random_state=0)
    print(json.dumps({"gradient boosting": boosting, "linear model": linear}))


if __name__ == "__main__":
    main()
