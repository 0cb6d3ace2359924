"""A traced step in stages, micro-batch by micro-batch.

Each operator of a step has a place: a phase and a stage of the model. Operators of one place form
one program, which runs for one micro-batch at a time, as scheduled. Tensors that one stage computes
and another reads are sent after each slot of the schedule. Tensors of a forward pass that the
backward pass needs are kept once for each micro-batch in flight.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from torch import fx

from dynsparse._core.checks import check_choice, check_integer, check_within
from popsparse.machine import (
    Copy,
    CrossReplicaCopy,
    Graph,
    Parallel,
    Profile,
    Program,
    Tensor,
    concat,
)
from popsparse.machine import Sequence as Steps
from popsparse.machine.dtypes import DType
from popsparse.machine.memory import find_carried
from popsparse.tensor_ops import map_elements

SCHEDULES = ("grouped", "interleaved", "sequential")

Key = tuple[str, ...]
"""Names a tensor of a step: ("parameter", name), ("buffer", name), ("state", parameter, key),
("rate", number of the group), ("input", number), ("target",), ("loss",), ("output",), and
("sum", parameter), the sum of the gradients of the micro-batches so far."""

FORWARD, BACKWARD, UPDATE, SHARED = "forward", "backward", "update", "shared"


class Step(NamedTuple):
    """A traced step.

    Attributes:
        module: holds the graph and its constants.
        inputs: the placeholder of every tensor.
        outputs: the node of the loss, and of the new value of each tensor that the step changes.
        stages: the processor of each stage of the model, and its name. Each node has the number of
            its stage in `meta["custom"]["stage"]`.
    """

    module: fx.GraphModule
    inputs: dict[Key, fx.Node]
    outputs: dict[Key, fx.Node]
    stages: list[tuple[int, str]]


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """The options of `compile`."""

    loss_scale: float
    device_iterations: int
    stochastic_rounding: int | None
    clip_grad_norm: float | None
    return_output: bool
    pipeline: str | None
    gradient_accumulation: int
    replicas: int

    def __post_init__(self) -> None:
        for name in ("device_iterations", "gradient_accumulation", "replicas"):
            check_integer(name, getattr(self, name), 1)
        check_within("loss_scale", self.loss_scale, "(0, inf)")
        if self.stochastic_rounding is not None:
            check_integer("stochastic_rounding", self.stochastic_rounding, 0)
        if self.clip_grad_norm is not None:
            check_within("clip_grad_norm", self.clip_grad_norm, "(0, inf)")
        if self.pipeline is not None:
            check_choice("pipeline", self.pipeline, SCHEDULES)
            if self.clip_grad_norm is not None:
                raise ValueError("clip_grad_norm needs all gradients at once: leave out pipeline")
        if self.replicas & (self.replicas - 1):
            raise ValueError(f"replicas must be a power of two, got {self.replicas}")
        if self.return_output and self.is_split:
            raise ValueError(
                "return_output returns that of a whole batch: leave out pipeline, "
                "gradient_accumulation and replicas"
            )

    @property
    def batches(self) -> int:
        """Number of micro-batches of a step, over all replicas."""
        return self.gradient_accumulation * self.replicas

    @property
    def is_split(self) -> bool:
        """Whether gradients are sums over micro-batches."""
        return self.pipeline is not None or self.batches > 1


class Place(NamedTuple):
    """The phase and stage of an operator. "shared" is for the optimizer's operators that affect all
    parameters, such as its step count; they run before "update"."""

    phase: str
    stage: int


class Pass(NamedTuple):
    """The forward or backward pass of one micro-batch through a stage."""

    phase: str
    stage: int
    batch: int


class StageProfile(NamedTuple):
    """The cost of a pipeline stage in a step.

    Attributes:
        processor: its processor. name: the name of its block.
        forward, backward: cycles of one pass of a micro-batch. update: cycles of the optimizer.
        batches: the most micro-batches whose activations it holds at once.
        activation_bytes: bytes of the copies of these activations; 0 if it holds one batch.
        tile_bytes: memory of the fullest tile of its processor.
        idle: the share of time that it waited while processors ran in parallel.
    """

    processor: int
    name: str
    forward: float
    backward: float
    update: float
    batches: int
    activation_bytes: int
    tile_bytes: int
    idle: float


def plan_slots(schedule: str, stages: int, batches: int) -> list[list[Pass]]:
    """The passes that run at once, slot by slot.

    "sequential": one after another, 2 n s slots for n micro-batches and s stages. "grouped": all
    forward passes, each stage a slot after the one before it, then all backward passes, 2 (n + s -
    1) slots. "interleaved": stages alternate between the next forward pass and the oldest backward
    pass, the same number of slots, but stage i holds at most s - i micro-batches, not n.
    """
    if schedule == "sequential":
        order = [*range(stages)]
        return [
            [Pass(phase, stage, batch)]
            for batch in range(batches)
            for phase, way in ((FORWARD, order), (BACKWARD, order[::-1]))
            for stage in way
        ]
    slots: list[list[Pass]] = [[] for _ in range(2 * (batches + stages - 1))]
    pace = 1 if schedule == "grouped" else 2
    turn = batches + stages - 1 if schedule == "grouped" else stages
    for batch in range(batches):
        for stage in range(stages):
            back = turn + stages - 1 - stage
            slots[pace * batch + stage].append(Pass(FORWARD, stage, batch))
            slots[pace * batch + back].append(Pass(BACKWARD, stage, batch))
    return slots


def most_batches_in_flight(slots: Iterable[Iterable[Pass]], stage: int) -> int:
    """The most micro-batches that are at once between their two passes at a stage."""
    running = most = 0
    for run in (run for slot in slots for run in slot if run.stage == stage):
        running += 1 if run.phase == FORWARD else -1
        most = max(most, running)
    return most


def assign(step: Step, cut: bool) -> tuple[dict[Any, Place], list[tuple[int, str]]]:
    """The place of each node of a step, and the processors and names of non-empty stages.

    Without `cut` there is one stage.

    Raises:
        NotImplementedError: a buffer that the backward pass reads and the forward pass changes; an
            optimizer that mixes parameters of several stages.
    """
    calls = [node for node in step.module.graph.nodes if node.op == "call_function"]
    scopes = {node: node.meta["custom"] for node in calls if "custom" in node.meta}
    used = sorted({s["stage"] for s in scopes.values() if s["phase"] == FORWARD}) if cut else [0]
    places: dict[Any, Place] = {}
    for node, scope in scopes.items():
        if scope["phase"] in (FORWARD, BACKWARD):
            stage = min(bisect_left(used, scope["stage"]), len(used) - 1)
            places[node] = Place(scope["phase"], stage)
    stages = [step.stages[number] for number in used] if cut else [(0, "")]
    homes: dict[str, int] = {}
    for key, node in step.inputs.items():
        users = [places[user] for user in node.users if user in places]
        stage = min((user.stage for user in users), default=0)
        if key[0] in ("parameter", "buffer"):
            phases = {user.phase for user in users}
            if key[0] == "buffer" and key in step.outputs and BACKWARD in phases:
                raise NotImplementedError(
                    f"buffer {key[1]!r} changes in the forward pass and is read in the backward "
                    "pass, which is not supported with micro-batches"
                )
            homes[key[1]] = stage
        elif key[0] in ("state", "sum") and key[1] in homes:
            stage = homes[key[1]]
        is_shared = key[0] == "rate" or key == ("state", "step")
        places[node] = Place(SHARED, 0) if is_shared else Place(FORWARD, stage)
    for node in calls:
        if node in places:
            continue
        near = [places[source] for source in node.all_input_nodes if source in places]
        near_stages = sorted({place.stage for place in near if place.phase != SHARED})
        if scopes.get(node, {}).get("phase") == "accumulate":
            places[node] = Place(BACKWARD, near_stages[0])
        elif len(near_stages) > 1:
            raise NotImplementedError(f"{node.target} mixes parameters of several stages")
        else:
            places[node] = Place(UPDATE, near_stages[0]) if near_stages else Place(SHARED, 0)
    return places, stages


class Pipeline:
    """The programs of the places of a step, and the transfers between them.

    Args:
        graph: the machine's graph.
        step: the traced step to split.
        schedule: one of `SCHEDULES`; None for one stage over the whole machine.
        batches: micro-batches of a step.

    Attributes:
        places: places of the nodes. stages: processor and name of each. graphs: those of their
            processors.

    Raises:
        ValueError: a block on a processor that the target does not have.
        NotImplementedError: see `assign`.
    """

    def __init__(self, graph: Graph, step: Step, schedule: str | None, batches: int) -> None:
        self.graph, self.step = graph, step
        self.places, self.stages = assign(step, schedule is not None)
        self._is_cut, self.batches = schedule is not None, batches
        self.slots = plan_slots(schedule or "sequential", len(self.stages), batches)
        self.in_flight = [
            most_batches_in_flight(self.slots, stage) for stage in range(len(self.stages))
        ]
        self.graphs = [graph]
        if self._is_cut:
            processors = graph.target.processors
            for processor, name in self.stages:
                if processor >= processors:
                    raise ValueError(
                        f"block {name!r} is on processor {processor}; the target has processors 0 "
                        f"to {processors - 1}"
                    )
            self.graphs = [graph.virtual(processor=processor) for processor, _ in self.stages]
        self.programs: dict[Place, Steps] = defaultdict(Steps)
        self.activation_bytes = [0] * len(self.stages)
        self._fixed = {
            node: key
            for key, node in step.inputs.items()
            if key[0] in ("parameter", "buffer", "state", "sum")
        }
        self._sends: dict[Place, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._arrived: dict[tuple[Any, str, int], Tensor] = {}
        self._incoming: list[tuple[Any, int, int]] = []

    def graph_of(self, node: fx.Node) -> Graph:
        """The graph of the processor where a node is computed, or held."""
        return self.graphs[self.places[node].stage]

    # Transfers between stages.

    def bring(self, node: Any, value: Tensor, place: Place | None) -> Tensor:
        """The result of a node for a reader at another place: the copy sent there.

        Raises:
            NotImplementedError: a stage reads the result of a later one; stages on several
                processors share a weight.
        """
        home = self.places[node]
        if place is None:
            return value
        if node in self._fixed and home.phase != SHARED:
            if self.stages[home.stage][0] != self.stages[place.stage][0]:
                kind, name = self._fixed[node][:2]
                raise NotImplementedError(
                    f"{kind} {name!r} is used by the stages {home.stage} and {place.stage} on two "
                    "processors: put them on one"
                )
            return value
        if home.phase == SHARED:
            if place.phase == SHARED or self.stages[place.stage][0] == self.stages[0][0]:
                return value
            return self._send(node, value, home, place.stage)
        if home.stage == place.stage:
            return value
        way = 1 if home.phase == FORWARD else -1
        if (place.stage - home.stage) * way < 0 or place.phase not in (FORWARD, BACKWARD):
            raise NotImplementedError(
                f"stage {place.stage} reads what stage {home.stage} makes in the {home.phase} "
                "pass: blocks must follow each other in the order in which they run"
            )
        # From stage to stage, so that it arrives with its micro-batch.
        for stage in range(home.stage, place.stage, way):
            value = self._send(node, value, Place(home.phase, stage), stage + way)
        return value

    def _send(self, node: Any, value: Tensor, origin: Place, stage: int) -> Tensor:
        """A copy of a tensor on the same tiles of another stage's processor."""
        key = (node, origin.phase, stage)
        if key in self._arrived:
            return self._arrived[key]
        graph, dtype = self.graph.root, value.dtype
        unique, place = np.unique(value.addresses().reshape(-1), return_inverse=True)
        source = Tensor(graph, dtype, unique.shape, addresses=unique)
        tiles = self.graphs[origin.stage].tiles_of(source)
        if any(
            kind is dtype and bool(((unique >= start) & (unique < stop)).any())
            for kind, start, stop in self._incoming
        ):
            # A received tensor may be overwritten while it is sent on, so a copy is sent.
            home = self.graphs[origin.stage]
            local = home.add_variable(dtype, unique.shape, "sent on", tiles=tiles)
            self.programs[origin].add(Copy(source, local, name="send on"))
            source = local
        name = f"{node.name} received"
        received = self.graphs[stage].add_variable(dtype, unique.shape, name, tiles=tiles)
        start = int(received.addresses()[0])
        self._incoming.append((dtype, start, start + received.numel))
        self._sends[origin].append((source, received))
        self._arrived[key] = received[place.reshape(value.shape)]
        return self._arrived[key]

    # The program of a step.

    def build(
        self, sums: Sequence[tuple[Key, Tensor]], loads: Sequence[tuple[Key, Copy]], loss: Copy
    ) -> Steps:
        """Build the program of a step.

        Args:
            sums: sums of gradients, initially zero.
            loads: copies from the host for each micro-batch.
            loss: the copy of the loss to the host.
        """
        zero: dict[int, Steps] = defaultdict(Steps)
        for key, total in sums:
            stage = self.places[self.step.inputs[key]].stage
            _set_to_zero(self.graphs[stage], total, zero[stage])
        by_stage: dict[int, list[Copy]] = defaultdict(list)
        for key, load in loads:
            by_stage[self.places[self.step.inputs[key]].stage].append(load)
        keeping = [self._keep(stage, by_stage[stage]) for stage in range(len(self.stages))]
        passes: dict[tuple[str, int, int], Steps] = {}
        sends: dict[frozenset[Place], Copy] = {}
        body = Steps(self._combine_stages(zero))
        for slot in self.slots:
            running: dict[int, Steps] = {}
            for phase, stage, batch in slot:
                number = batch % self.in_flight[stage]
                if (phase, stage, number) not in passes:
                    steps: list[Program] = [self.programs[Place(phase, stage)]]
                    if keeping[stage]:
                        keep, restore = keeping[stage][number]
                        steps = [*steps, keep] if phase == FORWARD else [restore, *steps]
                    passes[phase, stage, number] = Steps(*steps, name=self._name(stage, phase))
                running[stage] = passes[phase, stage, number]
                if phase == FORWARD:
                    body.add(*by_stage[stage])
            body.add(self._combine_stages(running))
            sent = frozenset(Place(phase, stage) for phase, stage, _ in slot)
            if sent not in sends:
                pairs = [pair for place in sorted(sent) for pair in self._sends[place]]
                sends[sent] = Copy(pairs, name="send")
            if sends[sent].pairs:
                body.add(sends[sent])
            if Place(FORWARD, len(self.stages) - 1) in sent:
                body.add(loss)
        if self.graph.replicas > 1:
            body.add(self._reduce([total for _, total in sums]))
        shared = Place(SHARED, 0)
        body.add(self.programs[shared])
        if self._sends[shared]:
            body.add(Copy(self._sends[shared], name="send"))
        stages = range(len(self.stages))
        update = {
            stage: Steps(self.programs[Place(UPDATE, stage)], name=self._name(stage, UPDATE))
            for stage in stages
        }
        return body.add(self._combine_stages(update))

    def _reduce(self, sums: Sequence[Tensor]) -> Steps:
        """Adds the sums of all replicas: in pairs, then in pairs of pairs, so that all of them have
        identical bits."""
        steps = Steps(name="all-reduce")
        by_type: dict[DType, list[Tensor]] = defaultdict(list)
        for total in sums:
            by_type[total.dtype].append(total.flatten())
        for dtype, totals in by_type.items():
            local = concat(totals)
            name, tiles = "sums of another replica", self.graph.tiles_of(local)
            theirs = self.graph.add_variable(dtype, local.shape, name, tiles=tiles)
            for bit in range(self.graph.replicas.bit_length() - 1):
                to = {replica: replica ^ 1 << bit for replica in range(self.graph.replicas)}
                steps.add(CrossReplicaCopy(local, theirs, to, name="exchange gradients"))
                map_elements(
                    self.graph,
                    "add gradients",
                    [local, theirs],
                    [local],
                    lambda a, b: [a + b],
                    steps,
                    like=local,
                    vector_operations=1,
                    functions=0,
                )
        return steps

    def _name(self, stage: int, phase: str) -> str | None:
        return f"stage {stage} {phase}" if self._is_cut else None

    def _combine_stages(self, by_stage: dict[int, Steps]) -> Program:
        """The programs of stages, in parallel if their processors are different."""
        if not self._is_cut:
            return Steps(*by_stage.values())
        branches: dict[int, Steps] = defaultdict(Steps)
        for stage, steps in by_stage.items():
            branches[self.stages[stage][0]].add(steps)
        return Parallel(branches)

    def _keep(self, stage: int, loads: list[Copy]) -> list[tuple[Copy, Copy]]:
        """For each micro-batch in flight the copies that save and restore the tensors that its
        forward pass leaves for the backward pass; empty if there is one at a time."""
        count, graph = self.in_flight[stage], self.graph.root
        if count == 1:
            return []
        arriving = Copy(self._sends[Place(FORWARD, stage - 1)]) if stage else Steps()
        first = [*loads, arriving, self.programs[Place(FORWARD, stage)]]
        kept = find_carried(graph, first, self.programs[Place(BACKWARD, stage)])
        pairs: list[list[tuple[Tensor, Tensor]]] = [[] for _ in range(count)]
        for variable in kept:
            flat = variable.tensor.flatten()
            pieces = graph.tile_map(variable.dtype).split(flat.runs())
            name = f"{variable.name} kept"
            copies = graph.add_variable(variable.dtype, [count, flat.numel], name)
            self.activation_bytes[stage] += count * variable.bytes
            for number in range(count):
                graph.map_stretches(copies[number], pieces.tiles, pieces.lengths)
                pairs[number].append((flat, copies[number]))
        return [
            (
                Copy(group, name=f"keep stage {stage}"),
                Copy([(copy, original) for original, copy in group], name=f"restore stage {stage}"),
            )
            for group in pairs
        ]

    def profile(self, run: Profile) -> list[StageProfile]:
        """The cost of each stage."""
        each = run.target.processor_tiles
        profiles = []
        for stage, (processor, name) in enumerate(self.stages):
            taken: dict[str, float] = {}
            for phase in (FORWARD, BACKWARD, UPDATE):
                nodes = [n for n in run.nodes if n.name == f"stage {stage} {phase}"]
                runs = sum(node.runs for node in nodes)
                taken[phase] = sum(node.cycles for node in nodes) / max(runs, 1)
            tiles = run.memory.per_tile[processor * each : (processor + 1) * each]
            profiles.append(
                StageProfile(
                    processor,
                    name,
                    taken[FORWARD],
                    taken[BACKWARD],
                    taken[UPDATE],
                    self.in_flight[stage],
                    self.activation_bytes[stage],
                    int(tiles.max()),
                    float(run.idle[processor]),
                )
            )
        return profiles


def _set_to_zero(graph: Graph, tensor: Tensor, program: Steps) -> None:
    map_elements(
        graph,
        "zero gradients",
        [],
        [tensor],
        lambda: [np.zeros((), tensor.dtype.numpy)],
        program,
        like=tensor,
        vector_operations=0,
        functions=0,
    )
