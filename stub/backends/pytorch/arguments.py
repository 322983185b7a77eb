"""Maps inputs to the arguments of `forward`, and outputs to its results, by their names."""

import re
from typing import Any, Dict, List, Mapping, NamedTuple, Optional, Sequence

from stub.user_model import ModelFailure

_INDEXED = re.compile(r".+__(\d+)")


class Argument(NamedTuple):
    """One argument of `forward`. `kind` is tensor, texts, dict (of tensors) or other."""

    name: str
    kind: str = "tensor"
    optional: bool = False
    default: Any = None


class ArgumentMapping:
    """The mapping from named inputs to the arguments of a call.

    `order` has the name of the input at each position, or None for the default value. With
    `as_dict`, the only argument is a dict of all inputs.
    """

    def __init__(
        self, order: Sequence[Optional[str]], arguments: Sequence[Argument], as_dict: bool = False
    ) -> None:
        self.order = list(order)
        self.as_dict = as_dict
        self._arguments = arguments

    def positional_arguments(self, inputs: Mapping[str, Any]) -> List[Any]:
        """Returns the positional arguments; omitted inputs get the default value."""
        if self.as_dict:
            return [dict(inputs)]
        values: List[Any] = []
        for position, name in enumerate(self.order):
            if name is not None and name in inputs:
                values.append(inputs[name])
            else:
                values.append(self._arguments[position].default)
        return values

    def argument_of(self, name: str) -> Argument:
        """Returns the argument to which an input is mapped."""
        if self.as_dict or not self._arguments:
            return Argument(name)
        return self._arguments[self.order.index(name)]


def map_inputs_to_arguments(
    model: str, names: Sequence[str], arguments: Optional[Sequence[Argument]]
) -> ArgumentMapping:
    """Maps inputs to positions: by `__<index>`, by the argument's name, else by their order.

    `arguments` is None if the file does not describe them. Raises ModelFailure.
    """
    if arguments is None:
        indices = _indices(names)
        order = names if indices is None else _order_by_index(model, "input", names, indices, None)
        return ArgumentMapping(order, ())
    if len(arguments) == 1 and arguments[0].kind == "dict":
        return ArgumentMapping([], arguments, as_dict=True)
    order = _positions(model, names, arguments)
    for argument, name in zip(arguments, order):
        if name is None and not argument.optional:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its configuration has no input for the"
                f" argument '{argument.name}' of forward({_signature(arguments)}); name inputs"
                " like the arguments, or <name>__<index>, or list them in the same order"
            )
        if name is not None and argument.kind in ("dict", "other"):
            raise ModelFailure(
                f"model '{model}' cannot be loaded: the argument '{argument.name}' of"
                f" forward({_signature(arguments)}) is not a tensor, so it cannot be the"
                f" input '{name}'"
            )
    return ArgumentMapping(order, arguments)


def _positions(
    model: str, names: Sequence[str], arguments: Sequence[Argument]
) -> List[Optional[str]]:
    indices = _indices(names)
    if indices is not None:
        return _order_by_index(model, "input", names, indices, len(arguments))
    known = [argument.name for argument in arguments]
    if all(name in known for name in names):
        return [name if name in names else None for name in known]
    if len(names) > len(arguments):
        raise ModelFailure(
            f"unable to load model '{model}', configuration expects {len(names)} inputs, model"
            f" provides {len(arguments)}: forward({_signature(arguments)})"
        )
    return [*names, *[None] * (len(arguments) - len(names))]


def map_outputs_to_results(model: str, names: Sequence[str]) -> Dict[str, int]:
    """Returns the position of each output among the results: by `__<index>`, else by their order.

    Raises ModelFailure.
    """
    indices = _indices(names)
    if indices is None:
        return {name: index for index, name in enumerate(names)}
    _order_by_index(model, "output", names, indices, None)
    return dict(zip(names, indices))


def _indices(names: Sequence[str]) -> Optional[List[int]]:
    """Returns the indices of the names; None unless all names have one."""
    found = [_INDEXED.fullmatch(name) for name in names]
    if not found or not all(found):
        return None
    return [int(match[1]) for match in found if match]


def _order_by_index(
    model: str, kind: str, names: Sequence[str], indices: Sequence[int], count: Optional[int]
) -> List[Optional[str]]:
    # Outputs may be omitted, and so may arguments that the file does not describe.
    order: List[Optional[str]] = [None] * (max(indices) + 1 if count is None else count)
    for name, index in zip(names, indices):
        if index >= len(order):
            raise ModelFailure(
                f"model '{model}' cannot be loaded: the index of its {kind} '{name}' is too large,"
                f" forward takes {len(order)} arguments"
            )
        if order[index] is not None:
            raise ModelFailure(
                f"model '{model}' cannot be loaded: its {kind}s '{order[index]}' and '{name}' have"
                " the same index"
            )
        order[index] = name
    if kind == "input" and count is None and None in order:
        raise ModelFailure(
            f"model '{model}' cannot be loaded: no input has the index {order.index(None)}"
        )
    return order


def _signature(arguments: Sequence[Argument]) -> str:
    return ", ".join(argument.name for argument in arguments)
