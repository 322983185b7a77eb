"""Which methods a model has."""

from __future__ import annotations


def defines(model: object, method: str) -> bool:
    """Whether a model has a method, by its class or by its ``__getattr__``.

    What a property of the class raises is for the caller of the method: it says what is wrong with
    the model.
    """
    try:
        return hasattr(type(model), method) or hasattr(model, method)
    except Exception:  # `__getattr__` may raise anything for a name it does not know, as in Triton
        return False
