"""The text of runners: straight-line Python for calls whose arguments are of given types.

Owns ``runner_source``, a pure function; ``_run.py`` compiles what it returns, once for each combination of types, and
says there what the names in it stand for. Loops over the arguments would take as long as all else that a remembered
call does.
"""

from __future__ import annotations

import keyword
from collections.abc import Sequence

# What an argument is to a runner.
TENSOR, FLOAT, SEQUENCE, VALUE = "tensor", "float", "sequence", "value"
REST = "rest"  # all arguments from here on, as one tuple of values; of direct runners


def runner_source(roles: Sequence[str], names: Sequence[str] = (), *, is_direct: bool = False) -> str | None:
    """Write ``run(func, given)`` for arguments of these roles, the last ones keywords of these names.

    A direct runner is ``run(func, v0, v1...)``, and its key has no number: its roles say the types of its arguments.
    None if the text could not say the names.
    """
    if not all(name.isidentifier() and not keyword.iskeyword(name) for name in names):
        return None
    places = range(len(roles))
    tensors = [i for i in places if roles[i] is TENSOR]
    first_keyword = len(roles) - len(names)
    argument = [f"*v{i}" if roles[i] is REST else f"v{i}" for i in places]
    local = [f"a{i}" if roles[i] is TENSOR else argument[i] for i in places]
    call = [local[i] if i < first_keyword else f"{names[i - first_keyword]}={local[i]}" for i in places]
    key = ["func", *map(_key, places, roles)]
    if is_direct:
        lines = [f"def run(func, {', '.join(f'v{i}' for i in places)}):"]
        given = f"({', '.join(argument)},)"
        apart = f"{given}, no_keywords"
    else:
        lines = ["def run(func, given):", f"    {', '.join(f'v{i}' for i in places)}, = given"]
        given, apart = "given", "*split(given, names)"
        key.insert(0, "number")
    for i in places:
        if roles[i] is SEQUENCE:
            lines.append(f"    if not ints.issuperset(map(type, v{i})):")
            lines.append(f"        return run_general(func, {apart})")
    lines += [f"    a{i} = v{i}._local" for i in tensors]
    lines += [
        f"    found = ({', '.join(key)})",
        "    try:",
        "        decision = cache[found]",
        "    except KeyError:",
        f"        decision = learn(found, func, {apart}, ({', '.join(f'v{i}' for i in tensors)},))",
        f"    if decision.graded is not None and grad_enabled() and "
        f"({' or '.join(f'a{i}.requires_grad' for i in tensors)}):",
        "        decision = decision.graded",
        f"    if {' and '.join(f'v{i}._copied_view is None' for i in tensors)}:",
        "        if decision.plain is not None:",
        f"            return wrap(decision.call({', '.join(call)}), decision.plain)",
        "        if decision.plain_write:",
        f"            decision.call({', '.join(call)})",
        f"            return v{tensors[0]}",
        f"    return run_decision(decision, func, {given}, [{', '.join(local)}], positions, names)",
    ]
    return "\n".join(lines) + "\n"


def _key(i: int, role: str) -> str:
    if role is TENSOR:
        return f"v{i}._spec"
    if role is FLOAT:  # as ``KEPT_FLOATS`` says
        return f"v{i} if v{i} in kept_floats else None"
    return f"tuple(v{i})" if role is SEQUENCE else f"v{i}"
