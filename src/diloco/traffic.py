"""Bytes that cross islands, counted in a compiled program.

The text of an optimised program (`jax.jit(f).lower(...).compile().as_text()`) says what moves. On
CPU and GPU a collective lists the devices of each group; on a TPU with several slices, what leaves
a slice is a `send` to the multi-slice runtime. Operations are reported per branch of a conditional,
since DiLoCo may cross islands only in the branch that sends.
"""

import collections
import math
import re
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import jax
import numpy as np


COLLECTIVES = (
    "all-gather",
    "all-reduce",
    "all-to-all",
    "collective-broadcast",
    "collective-permute",
    "ragged-all-to-all",
    "reduce-scatter",
)

_COMPUTATION = re.compile(r"^(ENTRY )?%?([\w.\-]+) (?:\([^=]*)?.*\{$")
_INSTRUCTION = re.compile(r"^\s+(?:ROOT )?%?([\w.\-]+) = (.*)$")
_ARRAY = re.compile(r"([a-z]+)(\d*)\w*\[([\d,<=]*)\]")
_CALLEE = re.compile(r"\b(calls|to_apply|body|true_computation|false_computation)=%?([\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{([^}]*)\}")
_GROUPS = re.compile(
    r"(?:replica_groups|source_target_pairs)=(\{\{.*?\}\}|\{\}|mesh\[.*?\}|\[.*?\]<=\[[\d,]*\](?:T\([\d,]*\))?)"
)
_TRANSFER = re.compile(r'_xla_megascale_transfer_type="(\w+)"')


class Branch(NamedTuple):
    """What one branch of a conditional moves each time it is taken.

    Attributes:
        path: Conditionals and branch numbers from the entry inwards, such as `"conditional.2/1"`.
        across: Bytes one chip hands to operations between islands, by operation.
        within: Bytes one chip hands to operations inside its island, by operation.
    """

    path: str
    across: dict[str, int]
    within: dict[str, int]


class Traffic(NamedTuple):
    """What one call of a compiled program moves.

    Attributes:
        unconditional: Bytes one chip hands to operations between islands outside every conditional,
            by operation.
        conditional: One entry per branch of every conditional. A nested conditional has its own
            entries and is not counted in the branch around it.
        within: Like `unconditional`, for operations inside an island.
    """

    unconditional: dict[str, int]
    conditional: tuple[Branch, ...]
    within: dict[str, int]

    @property
    def sends(self) -> tuple[Branch, ...]:
        """The branches with an operation between islands."""
        return tuple(branch for branch in self.conditional if branch.across)


class _Instruction(NamedTuple):
    name: str
    shape: str
    opcode: str
    inside: str  # the parentheses: names of operands, or a constant's value
    attributes: str

    @property
    def operands(self) -> list[str]:
        return re.findall(r"%([\w.\-]+)", self.inside)


def device_islands(mesh: jax.sharding.Mesh) -> list[int]:
    """Lists the island of every device, in the order in which a program on `mesh` numbers them.

    Args:
        mesh: A mesh with an axis `"islands"`.

    Returns:
        Island numbers, one per device.

    Example:
        >>> device_islands(jax.make_mesh((2, 4), ("islands", "fsdp")))
        [0, 0, 0, 0, 1, 1, 1, 1]
    """
    position = np.indices(mesh.devices.shape)[mesh.axis_names.index("islands")]
    return position.ravel().tolist()


def traffic(compiled_text: str, island_of_device: Sequence[int]) -> Traffic:
    """Counts the bytes that a compiled program moves between and inside islands.

    A chip's bytes are those of the operands it hands to the operation: the payload, before any
    factor of the algorithm behind it (with two islands a ring sends the payload once). An operation
    in a loop counts once per iteration: the text gives the loop's length, or its condition is
    `index < length` as JAX writes it; else once. On a TPU an island is a slice.

    Args:
        compiled_text: Text of the optimised program.
        island_of_device: Island of each device in the program's order, see `device_islands`.

    Returns:
        The traffic of one call.

    Raises:
        ValueError: If the text has no entry computation, so is not a compiled program.

    Example:
        >>> text = '''
        ... ENTRY %main (x: f32[4]) -> f32[8] {
        ...   %x = f32[4]{0} parameter(0)
        ...   ROOT %g = f32[8]{0} all-gather(%x), replica_groups={{0,2},{1,3}}, dimensions={0}
        ... }'''
        >>> traffic(text, [0, 0, 1, 1]).unconditional
        {'all-gather': 16}
        >>> traffic(text, [0, 1, 0, 1]).unconditional
        {}
    """
    computations, entry = _parse(compiled_text)
    if entry is None:
        raise ValueError(
            "the text has no ENTRY computation; pass compiled.as_text() of a compiled program"
        )
    shapes = {i.name: i.shape for instructions in computations.values() for i in instructions}
    across: dict[str, collections.Counter[str]] = {"": collections.Counter()}
    within: dict[str, collections.Counter[str]] = {"": collections.Counter()}

    def visit(computation: str, path: str, times: int) -> None:
        for i in computations.get(computation, ()):
            opcode = i.opcode.removesuffix("-start")
            if opcode in COLLECTIVES:
                crosses = _crosses(i.attributes, island_of_device)
                (across if crosses else within)[path][opcode] += times * sum(
                    _num_bytes(shapes.get(o, "")) for o in i.operands
                )
            elif opcode == "send" and (transfer := _TRANSFER.search(i.attributes)):
                across[path][transfer[1].lower().replace("_", "-")] += times * _num_bytes(
                    shapes[i.operands[0]]
                )
            for callee, branch, trips in _callees(i, computations):
                inner = path if branch is None else f"{path}/{i.name}/{branch}".lstrip("/")
                across.setdefault(inner, collections.Counter())
                within.setdefault(inner, collections.Counter())
                visit(callee, inner, times * trips)

    visit(entry, "", 1)
    branches = tuple(
        Branch(path, dict(across[path]), dict(within[path])) for path in across if path
    )
    return Traffic(dict(across[""]), branches, dict(within[""]))


def _parse(text: str) -> tuple[dict[str, list[_Instruction]], str | None]:
    """Splits a program into its computations; returns them and the entry's name."""
    computations: dict[str, list[_Instruction]] = {}
    entry = current = None
    for line in text.splitlines():
        if match := _INSTRUCTION.match(line):
            if current is not None:
                computations[current].append(_instruction(match[1], match[2]))
        elif (
            line.endswith("{")
            and (match := _COMPUTATION.match(line))
            and not line.startswith("HloModule")
        ):
            current = match[2]
            computations[current] = []
            entry = current if match[1] else entry
        elif line.startswith("}"):
            current = None
    return computations, entry


def _instruction(name: str, text: str) -> _Instruction:
    """Reads `shape opcode(operands), attributes`."""
    end = _balanced(text, 0) if text.startswith("(") else text.index(" ")
    shape, rest = text[:end], text[end:].lstrip()
    opening = rest.index("(")
    closing = _balanced(rest, opening)
    return _Instruction(
        name, shape, rest[:opening], rest[opening + 1 : closing - 1], rest[closing:]
    )


def _balanced(text: str, start: int) -> int:
    """Returns the position after the parenthesis that closes the one at `start`."""
    depth = 0
    for position in range(start, len(text)):
        depth += {"(": 1, ")": -1}.get(text[position], 0)
        if depth == 0:
            return position + 1
    raise ValueError(f"unbalanced parentheses in the program's line {text[:80]!r}")


def _callees(
    i: _Instruction, computations: dict[str, list[_Instruction]]
) -> Iterator[tuple[str, int | None, int]]:
    """Yields (computation, branch number or None, iterations) for what an instruction runs."""
    if i.opcode == "conditional":
        if match := _BRANCHES.search(i.attributes):
            for branch, callee in enumerate(re.findall(r"[\w.\-]+", match[1])):
                yield callee, branch, 1
        for kind, callee in _CALLEE.findall(i.attributes):
            yield callee, int(kind == "true_computation"), 1
        return
    trips = _trips(i.attributes, computations) if i.opcode == "while" else 1
    for _, callee in _CALLEE.findall(i.attributes):
        yield callee, None, trips


def _trips(attributes: str, computations: dict[str, list[_Instruction]]) -> int:
    """Returns a loop's length: as annotated, else the one integer its condition compares with."""
    if match := re.search(r'"known_trip_count":\{"n":"(\d+)"\}', attributes):
        return int(match[1])
    condition = re.search(r"condition=%?([\w.\-]+)", attributes)
    instructions = computations.get(condition[1], []) if condition else []
    limits = [
        i.inside for i in instructions if i.opcode == "constant" and i.shape.startswith("s32[]")
    ]
    return int(limits[0]) if len(limits) == 1 and limits[0].isdigit() else 1


def _num_bytes(shape: str) -> int:
    """Returns the bytes of a shape such as `(bf16[2,3]{1,0}, u32[])`; tokens are free."""
    total = 0
    for kind, bits, dimensions in _ARRAY.findall(shape):
        width = 8 if kind == "pred" else int(bits or 0)
        total += math.ceil(
            math.prod(int(d.lstrip("<=")) for d in dimensions.split(",") if d) * width / 8
        )
    return total


def _crosses(attributes: str, island_of_device: Sequence[int]) -> bool:
    """Whether a group of a collective has members on two islands."""
    match = _GROUPS.search(attributes)
    groups = _groups(match[1] if match else "{}", len(island_of_device))
    return any(len({island_of_device[device] for device in group}) > 1 for group in groups)


def _groups(text: str, num_devices: int) -> list[list[int]]:
    """Reads `{{0,1},{2,3}}`, `[2,2]<=[2,2]T(1,0)`, `mesh['a'=2,'b'=2] {'b'}` or `{}` (all)."""
    if text == "{}":
        return [list(range(num_devices))]
    if text.startswith("{"):
        return [_integers(group) for group in re.findall(r"\{([\d,]+)\}", text)]
    if text.startswith("["):
        shape, iota = text.split("<=")
        return _iota(iota).reshape(_integers(shape)).tolist()
    return _mesh_groups(text)


def _mesh_groups(text: str) -> list[list[int]]:
    """Reads `mesh['a'=2,'b'=4], device_ids=([4,2]T(1,0)) {'a','b':(2)2}`.

    `'b':(2)2` groups the part of size 2 that has 2 before it; each axis is (before, part, after).
    """
    pattern = r"mesh\[(.*?)\](?:, device_ids=\((.*)\))? \{(.*)\}"
    axes, assignment, grouped = re.fullmatch(pattern, text).groups()
    parts = {
        name: (int(before or 1), int(part or 0))
        for name, before, part in re.findall(r"([^,:]+)(?::\((\d+)\)(\d+))?", grouped)
    }
    shape: list[int] = []
    for name, size in re.findall(r"([^,]+)=(\d+)", axes):
        before, part = parts.get(name, (1, 1))
        part = part or int(size)
        shape += [before, part, int(size) // (before * part)]
    moved = list(range(1, len(shape), 3))
    kept = [axis for axis in range(len(shape)) if axis not in moved]
    ids = _iota(assignment) if assignment else np.arange(math.prod(shape))
    groups = ids.reshape(shape).transpose(kept + moved)
    return groups.reshape(-1, math.prod(shape[axis] for axis in moved)).tolist()


def _iota(text: str) -> np.ndarray:
    """Reads `[4,2]T(1,0)` (counted up, reshaped, transposed) or a plain list of numbers."""
    if not (match := re.fullmatch(r"\[([\d,]+)\](?:T\(([\d,]+)\))?", text)):
        return np.array(_integers(text))
    shape = _integers(match[1])
    ids = np.arange(math.prod(shape)).reshape(shape)
    return ids.transpose(_integers(match[2])) if match[2] else ids


def _integers(text: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", text)]
