"""Asks for the minutes of three deliveries, and for the reasons of the last one."""

import pbhost

VEHICLES, DISTANCES, HOURS = ["bicycle", "car", "car"], [6, 6, 6], [12, 12, 17]


def column(values):
    return [[value] for value in values]


with pbhost.Client("localhost:8001") as client:
    table = {"DISTANCE": column(DISTANCES), "HOUR": column(HOURS), "VEHICLE": column(VEHICLES)}
    minutes = client.infer("delivery", table, outputs=["MINUTES"])["MINUTES"][:, 0]
    last = {name: values[-1:] for name, values in table.items()}
    shares = client.infer("delivery", last, outputs=["CONTRIBUTIONS"])["CONTRIBUTIONS"][0]

for vehicle, distance, hour, value in zip(VEHICLES, DISTANCES, HOURS, minutes, strict=True):
    print(f"{vehicle}, {distance} km, {hour}:00: {value:.0f} minutes")
named = zip(("distance", "hour", "vehicle"), shares, strict=True)
print("because of", ", ".join(f"{name} {share:+.0f}" for name, share in named))
