"""Names the tensors of an encoded state: the model's by its own names, the rest by where they lie in the state.

Pure. The names are the keys of a save's tensor files, so other tools find a model's weights in a save. Those of a job's
state: ``layers.0.weight`` for the model's, ``optimizer.state.3.exp_avg`` for the optimizer's (by the number that
``Optimizer.state_dict`` gives a parameter), ``others.NAME...`` for the further objects.
"""

from __future__ import annotations

from collections.abc import Iterator

from phalanx.elastic.checkpoint._state_codec import Json


def optimizer_name(number: int, key: str) -> str:
    """Return the name of a tensor of an optimizer's state, of the parameter with this number in its state dict.

    >>> optimizer_name(3, "exp_avg")
    'optimizer.state.3.exp_avg'
    """
    return f"optimizer.state.{number}.{key}"


def tensor_names(tree: Json, count: int) -> list[str]:
    """Return a name for each of the ``count`` tensors of an encoded state, no name twice.

    >>> tensor_names({"parts": {"model": {"w": {"$": "tensor", "i": 0}}}, "rest": [{"$": "tensor", "i": 1}]}, 2)
    ['w', 'rest.0']
    """
    paths: dict[int, tuple[str, ...]] = {}
    for number, path in _paths(tree, ()):
        paths.setdefault(number, path)
    names: list[str] = []
    used: set[str] = set()
    for number in range(count):
        wanted = _name(paths.get(number, (f"{number:06d}",)))
        name, again = wanted, 2
        while name in used:
            name, again = f"{wanted}#{again}", again + 1
        used.add(name)
        names.append(name)
    return names


def _name(path: tuple[str, ...]) -> str:
    for prefix in (("parts", "model"), ("parts",)):
        if path[: len(prefix)] == prefix and len(path) > len(prefix):
            return ".".join(path[len(prefix) :])
    return ".".join(path)


def _paths(tree: Json, path: tuple[str, ...]) -> Iterator[tuple[int, tuple[str, ...]]]:
    if isinstance(tree, list):
        for number, item in enumerate(tree):
            yield from _paths(item, (*path, str(number)))
    elif isinstance(tree, dict):
        kind = tree.get("$")
        if kind is None:
            for key, item in tree.items():
                yield from _paths(item, (*path, key))
        elif kind == "tensor":
            yield tree["i"], path
        elif kind == "dict":
            for key, item in tree["v"]:
                yield from _paths(item, (*path, str(key)))
        elif kind in ("tuple", "set"):
            yield from _paths(tree["v"], path)
