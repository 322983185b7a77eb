"""Trains a forest of TREES trees for VERSION: `python train.py TREES VERSION`."""

import sys
from pathlib import Path

import joblib
from sklearn.datasets import load_iris
from sklearn.ensemble import RandomForestClassifier

trees, version = int(sys.argv[1]), sys.argv[2]
flowers = load_iris()
forest = RandomForestClassifier(trees, random_state=0).fit(flowers.data, flowers.target)
folder = Path("models/iris") / version
folder.mkdir(parents=True, exist_ok=True)
joblib.dump(forest, folder / "forest.joblib")
print(f"version {version}: {trees} trees")
