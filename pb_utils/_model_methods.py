"""Which methods a model has."""

from __future__ import annotations


def defines(model: object, method: str) -> bool:
    """Whether a model has a method, by its class or by its ``__getattr__``.

    If a property of the class raises another error than AttributeError, the model has it: the
    error tells the caller of the method what is wrong.
    """
    try:
        return hasattr(model, method)
    except Exception:  # `__getattr__` may raise anything for a name it does not know, as in Triton
        return any(method in vars(part) for part in type(model).__mro__)
