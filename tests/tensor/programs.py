"""Random programs of a few torch calls, on plain tensors and on DTensors: what every name holds at the end must agree.

A program is a list of lines of Python over the names v1, v2, ...; both sides run the same lines, with other functions
behind ``leaf`` and ``move``. Lines are drawn from templates and kept if plain tensors take them. Values are multiples
of 1/16, and functions that jump (comparisons, sorting) see nothing but fresh leaves, so that rounding decides nothing.

``python tests/tensor/programs.py FIRST COUNT`` runs so many seeds and prints shrunken programs that differ.
"""

from __future__ import annotations

import math
import random
import re
import sys
import warnings
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx import comm
from phalanx.comm import DeviceMesh, init_device_mesh
from phalanx.tensor import DTensor, Partial, Replicate, Shard, StridedShard, distribute_tensor

MESHES = [(2,), (3,), (2, 2), (2, 3)]
LIMIT = 1e4  # larger values would drown others in rounding

# What docs/tensor.md says is refused.
REFUSALS = re.compile(
    "had to be copied|is not resized|do not support gradients|would have to move its data|cannot be cast|leaf Variable"
    "|cannot be reduced where a gradient is needed|has no gradient; redistribute|refer to a single memory location"
)

# {n}, {m}: new names; {a}, {b}, {c}: any; {x}: one that requires grad; {f}: a fresh leaf; {d}, {e}: dims; {k}: 1 to 3;
# {s}: a number; {i}: an index; {l}: a layout.
TEMPLATES = """
{n} = {f}
{n} = {f}
{n} = {a} + {b}
{n} = {a} * {b}
{n} = {a} - {s}
{n} = {a} / 4
{n} = torch.sub({a}, {b}, alpha={k})
{n} = {a} * torch.tensor(0.5, dtype=torch.float32)
{n} = torch.where({f} > 0, {a}, {b})
{n} = {a}.tanh()
{n} = torch.sin({a})
{n} = {a}.sigmoid() ** 2
{n} = torch.lerp({a}, {b}, 0.25)
{n} = {a}.masked_fill({f} > 0, {s})
{a}.add_({b})
{a}.mul_({s})
{a} += {b}
{a}.copy_({b})
{a}.fill_({s})
{a}.zero_()
{a}.addcmul_({b}, {c}, value=0.5)
{a}.masked_fill_({f} > 0, {s})
{a}.cumsum_({d})
{a}.tril_()
{a}.t_()
{a}.unsqueeze_({d})
{a}.squeeze_({d})
with torch.no_grad(): {a}.mul_({b})
with torch.no_grad(): {n} = torch.add({a}, {b}, out={c})
torch._foreach_mul_([{a}, {b}], 0.5)
{n} = {a}.sum()
{n} = {a}.sum({d}, keepdim=True)
{n} = {a}.mean({d})
{n} = {a}.mean()
{n} = {a}.var({d})
{n} = {a}.logsumexp({d})
{n} = {a}.norm()
{n} = {a}.cumsum({d})
{n} = torch.linalg.vector_norm({a} + 9, 2, {d})
{n} = {f}.amax({d})
{n} = {f}.argmax({d})
{n} = {f}.argmin()
{n}, {m} = {f}.max({d})
{n}, {m} = {f}.sort({d}, stable=True)
{n}, _ = {f}.topk({k}, {d})
{n} = {f} > {s}
{n} = {f}.floor()
{n} = {a} @ {b}
{n} = {a} @ {b}.mT
{n} = F.linear({a}, {b}, {c})
{n} = torch.einsum("ij,kj->ik", {a}, {b})
{n} = torch.einsum("ij->ji", {a})
{n} = {a}.t()
{n} = {a}.transpose({d}, {e})
{n} = {a}.mT
{n} = {a}.unsqueeze({d})
{n} = {a}.squeeze()
{n} = {a}.select({d}, {k} - 1)
{n} = {a}.narrow({d}, {k} - 1, {k})
{n} = {a}.reshape(-1)
{n} = {a}.view(-1)
{n} = {a}.flatten()
{n} = {a}.flatten(0, 1)
{n} = {a}.contiguous()
{n} = {a}.view({b}.shape)
{n} = {a}.reshape({b}.shape)
{n} = {a}.expand({b}.shape)
{n} = {a}.unflatten({d}, (-1, {k}))
{n} = {a}.diagonal()
{n} = {a}.movedim({d}, {e})
{n} = {a}.detach()
{n} = {a}.clone()
{n} = {a}[{i}]
{n} = {a}[{i}]
{n}, {m} = {a}.chunk(2, {d})
{n}, {m} = {a}.split({k}, {d})
{n}, {m} = {a}.unbind({d})
{a}[{i}] = {b}
{a}[{i}] = {s}
{a}[{i}] += {b}
{a}[{i}] *= {s}
{a}[{f} > 0] = {s}
{n} = {a}[[0, {k}]]
{n} = {a}[:, [{k}, 0]]
{n} = {a}[{f} > 0]
{n} = torch.cat([{a}, {b}], {d})
{n} = torch.stack([{a}, {a}], {d})
{n} = F.pad({a}, (1, {k}), value={s})
{n} = {a}.roll({k}, {d})
{n} = {a}.flip({d})
{n} = {a}.repeat_interleave(2, {d})
{n} = {a}.tile((2,))
{n} = torch.gather({a}, {d}, ({a}.detach() * 0).long())
{n} = torch.scatter_add({a}, {d}, ({b}.detach() * 0).long(), {b})
{n} = {a}.softmax({d})
{n} = F.log_softmax({a}, {d})
{n} = F.layer_norm({a}, {a}.shape[-1:])
{n} = F.layer_norm({a}, {b}.shape, {b}, {c})
{n} = F.mse_loss({a}, {b})
{n} = F.gelu({a})
{n} = F.cross_entropy({a}, {b}.softmax(1))
{n} = F.scaled_dot_product_attention({a}, {a}, {b})
{n} = {a}.to(torch.float64)
{n} = {a}.double()
{n} = {a}.type_as({b})
{n} = {a}.float()
{n} = move({a}, {l})
{n} = move({a}, {l}, async_op=True)
{n} = {a}.detach().clone().requires_grad_()
{n} = torch.zeros_like({a})
{x}.retain_grad()
{x}.register_hook(lambda g: g * 2) if {x}.grad_fn is not None else None
loss({x}).backward(retain_graph=True)
[{n}] = torch.autograd.grad(loss({x}), [{y}], create_graph=True)
{n} = {x}.grad
{x}.grad = None
{n} = {a}.sum().item()
""".strip().splitlines()


def values(seed: int, shape: Any, dtype: torch.dtype) -> Tensor:
    count = math.prod(shape)
    order = torch.randperm(max(count, 1), generator=torch.Generator().manual_seed(seed))[:count]
    found = (order - count // 2).reshape(shape)
    return ((found * 2 + 3) / 16 if dtype.is_floating_point else found).to(dtype)


class Plain:
    """The names that lines use, for plain tensors."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {
            "torch": torch,
            "F": F,
            "leaf": self.leaf,
            "move": self.move,
            "loss": self.loss,
        }

    def leaf(self, seed: int, shape: Any, dtype: torch.dtype, grad: bool, layout: str) -> Any:
        return values(seed, shape, dtype).requires_grad_(grad)

    def move(self, x: Any, layout: str, async_op: bool = False) -> Any:
        for p in _parsed(layout):
            if p.dim >= x.dim() if isinstance(p, Shard) else p.is_partial() and not x.is_floating_point():
                raise ValueError(f"{layout} does not fit {x.dtype}{list(x.shape)}")
        return x.clone()

    def loss(self, x: Any) -> Any:
        return (x * self.leaf(7, x.shape, x.dtype, False, "")).sum()

    def run(self, lines: list[str]) -> None:
        for line in lines:
            exec(line, self.names)
            for x in self.tensors().values():
                x.is_leaf  # noqa: B018  # asked, a view learns what its base went through

    def tensors(self) -> dict[str, Tensor]:
        return {n: v for n, v in self.names.items() if re.fullmatch(r"v\d+", n) and isinstance(v, Tensor)}

    def whole(self, x: Any) -> Tensor:
        return x.detach().clone()

    def state(self) -> dict[str, Any]:
        """Everything that a user can see; a view that says it is out of date is left out."""
        found: dict[str, Any] = {n: v for n, v in self.names.items() if re.fullmatch(r"v\d+", n)}
        for name, x in self.tensors().items():
            graded = x.is_floating_point() and not (x.is_leaf and type(x) is Tensor and x._is_view())
            try:
                found[name] = [self.whole(x), (x.requires_grad, x.is_leaf) if graded else None]
                grad = x.grad if x.is_leaf or x.retains_grad else None
                found[f"{name}.grad"] = None if grad is None else self.whole(grad)
            except RuntimeError as error:
                if "out of date" not in str(error):
                    raise
                del found[name]
        return found


class Distributed(Plain):
    """The same for DTensors."""

    def __init__(self, mesh: DeviceMesh) -> None:
        super().__init__()
        self.mesh = mesh

    def leaf(self, seed: int, shape: Any, dtype: torch.dtype, grad: bool, layout: str) -> Any:
        placements = _parsed(layout) if layout else (Replicate(),) * self.mesh.ndim
        whole = [Replicate() if p.is_partial() else p for p in placements]
        local = distribute_tensor(values(seed, shape, dtype), self.mesh, whole, src_data_rank=None).to_local().clone()
        for axis, placement in enumerate(placements):
            if placement.is_partial():  # contributions that differ
                size, at = self.mesh.shape[axis], self.mesh.get_local_rank(axis)
                share = at - (size - 1) / 2 if placement.is_partial("avg") else 1 if at else 1 - size
                local = local + share if placement.is_partial("avg") or not at else torch.full_like(local, share)
        return DTensor.from_local(local, self.mesh, placements, shape=shape).detach().requires_grad_(grad)

    def move(self, x: Any, layout: str, async_op: bool = False) -> Any:
        moved = x.redistribute(placements=_parsed(layout), async_op=async_op)
        return moved.clone() if moved.placements == x.placements else moved

    def whole(self, x: Any) -> Tensor:
        assert tuple(x._local.shape) == x._spec.local_shape, f"{x._spec!r} holds a part of {x._local.shape}"
        return x.detach().full_tensor().clone()


def _parsed(layout: str) -> tuple[Any, ...]:
    kinds = {"R": lambda _: Replicate(), "S": lambda d: Shard(int(d)), "T": lambda d: StridedShard(int(d), 2)}
    return tuple(kinds[part[0]](part[1:]) if part[0] in kinds else Partial(part) for part in layout.split(","))


class Generator(Plain):
    """Lines that plain tensors take."""

    def __init__(self, seed: int, mesh: tuple[int, ...]) -> None:
        super().__init__()
        self.rng, self.mesh, self.count = random.Random(seed), mesh, 0
        self.lines: list[str] = []
        self.sizes = [self.rng.randint(1, 7) for _ in range(3)]
        length = self.rng.randint(6, 20)
        for attempt in range(40 * length):
            self._try("{n} = {f}" if attempt < 3 else self.rng.choice(TEMPLATES))
            if len(self.lines) == length:
                break
        for _ in range(2):
            for name in list(self.tensors()):
                self._try(f"loss({name}).backward(retain_graph=True)")

    def _try(self, template: str) -> None:
        before = self.count
        try:
            line = re.sub(r"{(\w)}", lambda found: getattr(self, f"_{found[1]}")(), template)
            self.run([line])
            assert all(x.numel() < 2000 and x.dim() < 5 and _moderate(x) and _fits(x) for x in self.tensors().values())
            self.lines.append(line)
        except Exception:  # plain tensors do not take it, or what came of it
            self.count = before
            super().__init__()
            self.run(self.lines)

    def _n(self) -> str:
        self.count += 1
        return f"v{self.count}"

    _m = _n

    def _a(self) -> str:
        return self.rng.choice(list(self.tensors()))

    _b = _c = _a

    def _x(self) -> str:
        return self.rng.choice([n for n, x in self.tensors().items() if x.requires_grad])

    _y = _x

    def _d(self) -> str:
        return str(self.rng.randint(-2, 1))

    _e = _d

    def _k(self) -> str:
        return str(self.rng.randint(1, 3))

    def _s(self) -> str:
        return self.rng.choice(["2", "-1", "0.5", "3", "0", "1.0", "True"])

    def _i(self) -> str:
        keys = [":", "0", "-1", "1:", ":-1", "::2", "None", "...", "1:3"]
        return ", ".join(self.rng.choices(keys, k=self.rng.randint(1, 3)))

    def _l(self, shape: Any = (2, 2), dtype: str = "float64") -> str:
        kinds = ["R", *(f"S{d}" for d in range(len(shape))), *(f"S{d}" for d in range(len(shape)))]
        kinds += ["sum", "avg", *(f"T{d}" for d in range(len(shape)))] if dtype.startswith("float") else []
        return repr(",".join(self.rng.choice(kinds) for _ in self.mesh))

    def _f(self) -> str:
        a, b, c = self.sizes
        shape = self.rng.choice([(a, b, c), (a, b), (b, c), (c,), (a, 1), (1, c), (), (c, c), (b, a)])
        dtype = self.rng.choice(["float64"] * 8 + ["float32", "int64"])
        grad = dtype == "float64" and self.rng.random() < 0.6
        layout = self._l(shape, dtype)
        return f"leaf({self.rng.randrange(99)}, {shape}, torch.{dtype}, {grad}, {layout})"


def _fits(x: Tensor) -> bool:
    """Torch keeps the gradient of a tensor whose shape was changed in place since in the old one."""
    return not x.retains_grad or x.grad is None or x.grad.shape == x.shape


def _moderate(x: Tensor) -> bool:
    return not x.numel() or x.dtype is torch.bool or bool(x.detach().abs().max() < LIMIT)


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    return [
        f"{name}: {found[name]} expected {value}"
        for name, value in expected.items()
        if name.split(".")[0] in found and not _same(found.get(name), value)
    ]


def _same(found: Any, expected: Any) -> bool:
    if isinstance(expected, list):
        return _same(found[0], expected[0]) and (expected[1] is None or found[1] == expected[1])
    if isinstance(expected, float):
        return math.isclose(found, expected, rel_tol=1e-3, abs_tol=1e-3)
    if not isinstance(expected, Tensor) or not isinstance(found, Tensor):
        return bool(found is expected or found == expected)
    same_kind = found.shape == expected.shape and found.dtype == expected.dtype
    return same_kind and torch.allclose(found.double(), expected.double(), rtol=1e-3, atol=1e-3, equal_nan=True)


_MAKES = re.compile(r"(?:with torch.no_grad\(\): )?\[?(v\d+)(?:, (\w+))?\]? = ")


def without(lines: list[str], number: int) -> list[str]:
    """The lines that need neither line ``number`` nor what it makes."""
    gone: set[str] = set()
    kept = []
    for at, line in enumerate(lines):
        makes = _MAKES.match(line)
        if at == number or set(re.findall(r"\bv\d+", line[makes.end() :] if makes else line)) & gone:
            gone |= set(makes.groups()) if makes else set()
        else:
            kept.append(line)
    return kept


def check(shape: tuple[int, ...], lines: list[str]) -> str:
    """What is wrong with a program on a mesh of ``shape``; lines that are refused are left out. Empty: nothing."""
    while True:
        plain = Plain()
        plain.run(lines)
        expected = plain.state()

        def body(group: Any, lines: list[str] = lines, expected: Any = expected) -> tuple[int | None, str]:
            side = Distributed(init_device_mesh("cpu", shape))
            for number, line in enumerate(lines):
                try:
                    side.run([line])
                except Exception as error:
                    known = isinstance(error, (RuntimeError, NotImplementedError)) and REFUSALS.search(str(error))
                    return number, "" if known else f"{line}: {type(error).__name__}: {error}"
            return None, "; ".join(differences(side.state(), expected))

        try:
            results = comm.simulate(math.prod(shape), timeout=60).run(body)
        except Exception as error:  # ranks that do not agree
            return f"{type(error).__name__}: {error}"
        refused, problem = results[0]
        if len({number for number, _ in results}) > 1:
            return f"ranks disagree: {results}"
        if refused is None or problem:
            return problem or next((text for _, text in results if text), "")
        lines = without(lines, refused)
        if not _runs(lines):
            return ""  # a line that was left out wrote what others need


def _runs(lines: list[str]) -> bool:
    try:
        Plain().run(lines)
    except Exception:
        return False
    return True


def shrunken(shape: tuple[int, ...], lines: list[str]) -> list[str]:
    """A program as short as can be that is still wrong."""
    for number in reversed(range(len(lines))):
        fewer = lines[:number] + lines[number + 1 :]
        if _runs(fewer) and check(shape, fewer):
            lines = fewer
    return lines


def failures(seeds: range, shape: tuple[int, ...]) -> list[str]:
    """Shrunken programs that are wrong, with what is wrong."""
    found = []
    for seed in seeds:
        lines = Generator(seed, shape).lines
        if check(shape, lines):
            lines = shrunken(shape, lines)
            found.append("\n".join([f"seed {seed} on {shape}:", *lines, check(shape, lines)]))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    first, count = map(int, sys.argv[1:])
    for mesh_shape in MESHES:
        print(mesh_shape, *failures(range(first, first + count), mesh_shape), sep="\n\n", flush=True)
