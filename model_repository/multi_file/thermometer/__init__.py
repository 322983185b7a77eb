"""A package in the model's folder, shared by all its versions."""


def fahrenheit(celsius):
    return celsius * 9 / 5 + 32
