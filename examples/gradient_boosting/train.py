"""Trains a model on deliveries that are made up, and writes it into the model's folder."""

from pathlib import Path

import lightgbm
import numpy as np

SPEEDS = np.array([15, 40, 30])  # km/h of a bicycle, a car, a van


def deliveries(count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a table of distance, hour and vehicle, and the minutes of each delivery."""
    random = np.random.default_rng(seed)
    distance = random.uniform(0.5, 15, count)
    hour = random.integers(8, 20, count)
    vehicle = random.integers(0, 3, count)
    in_traffic = (hour >= 16) & (hour < 19) & (vehicle > 0)
    minutes = 4 + 60 * distance / SPEEDS[vehicle] * np.where(in_traffic, 1.8, 1)
    return np.column_stack([distance, hour, vehicle]), minutes + random.normal(0, 1, count)


table, minutes = deliveries(2000, seed=1)
columns = ["distance", "hour", "vehicle"]
data = lightgbm.Dataset(table, minutes, feature_name=columns, categorical_feature=["vehicle"])
options = {"objective": "regression", "verbose": -1, "num_threads": 1, "seed": 1}
booster = lightgbm.train(options, data, num_boost_round=300)
booster.save_model(Path("models/delivery/1/delivery.txt"))

table, minutes = deliveries(500, seed=2)
error = np.abs(booster.predict(table) - minutes).mean()
print(f"2000 deliveries, error on 500 others: {error:.1f} minutes")
