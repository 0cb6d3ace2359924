"""Lowering of programs to steps, which are run and counted."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from popsparse.machine import program as programs
from popsparse.machine.checks import check_compute_set
from popsparse.machine.dtypes import AbortError, OutOfMemoryError, ProgramError
from popsparse.machine.exchange import CopyPlan, bind_pair, broadcast_cycles, link_cycles, plan_copy
from popsparse.machine.intervals import ranks
from popsparse.machine.profile import CodeletProfile, Profile
from popsparse.machine.state import Node, State
from popsparse.machine.tensor import Tensor
from popsparse.machine.vertex import BoundVertices, VertexSet


def _measure_link(state: State, numel: int, dtype: Any, rate: float) -> tuple[int, float]:
    """Bytes of all replicas, and the cycles to move them at once."""
    size = numel * dtype.size * len(state.memories)
    return size, float(math.ceil(size / rate * state.target.clock_hz))


def _lower_stream_copy(state: State, program: programs.Copy, path: str) -> Node:
    """A copy to or from the host, whose link the replicas share."""
    stream = program.stream
    assert stream is not None
    step = state.add_step(program, path, "host")
    src, dst = program.pairs[0]
    target = state.target
    up = stream.to_device
    rate = target.host_read_bytes_per_second if up else target.host_write_bytes_per_second
    size, cycles = _measure_link(state, stream.numel, stream.dtype, rate)
    flat = (dst if up else src).flatten()

    def run(profile: Profile) -> None:
        if state.computes(stream.dtype):
            for replica in range(len(state.memories)):
                if up:
                    state.write(flat, state.host.fetch(stream), replica)
                else:
                    state.host.deliver(stream, state.read(flat, replica))
        moved: dict[str, Any] = {"from_host_bytes" if up else "to_host_bytes": size}
        profile.record(step, sync=state.sync_of_all, host=cycles, **moved)

    return run


def _lower_remote_copy(state: State, program: programs.Copy, path: str) -> Node:
    """A copy to or from the memory beside a processor, for which replicas do not wait."""
    buffer = program.remote
    assert buffer is not None
    if state.graph.remote_buffers.get(buffer.name) is not buffer:
        raise ProgramError(f"remote buffer {buffer.name!r} belongs to another graph")
    src, dst = program.pairs[0]
    up = isinstance(dst, Tensor)  # towards the tiles
    tensor: Tensor = dst if up else src
    tiles = state.graph.root.tiles_of(tensor)
    processors = np.unique(tiles // state.target.processor_tiles).tolist()
    home = state.remote_home.setdefault(buffer, processors)
    if len(processors) > 1 or processors != home:
        raise ProgramError(
            f"remote buffer {buffer.name!r} is beside one processor: {tensor.name} and all other "
            f"tensors copied must be on its tiles, got tiles of processors "
            f"{sorted({*processors, *home})}"
        )
    beside = [other for other, at in state.remote_home.items() if at == home]
    taken = sum(other.bytes for other in beside)
    if taken > state.target.remote_bytes:
        raise OutOfMemoryError(
            f"remote buffers beside processor {home[0]} take {taken:,} bytes, with "
            f"{buffer.name!r}, of the {state.target.remote_bytes:,} that it has"
        )
    step = state.add_step(program, path, "remote")
    target = state.target
    rate = target.remote_read_bytes_per_second if up else target.remote_write_bytes_per_second
    size = buffer.numel * buffer.dtype.size
    cycles = float(math.ceil(size / rate * target.clock_hz))
    amount = "from_remote_bytes" if up else "to_remote_bytes"
    moved: dict[str, Any] = {amount: size * len(state.memories)}
    flat, index = tensor.flatten(), program.index

    def row(replica: int) -> int:
        if index is None:
            return 0
        number = int(state.read(index, replica).reshape(-1)[0])
        if not 0 <= number < buffer.rows:
            raise ProgramError(
                f"{path!r}: remote buffer {buffer.name!r} has rows 0 to {buffer.rows - 1}, got "
                f"{number}"
            )
        return number

    def run(profile: Profile) -> None:
        for replica in range(len(state.memories)):
            place = row(replica)
            if not state.computes(buffer.dtype):
                continue
            rows = state.remote[buffer][replica]
            if up:
                state.write(flat, rows[place], replica)
            else:
                rows[place] = state.read(flat, replica)
        profile.record(step, sync=state.sync_of_all, host=cycles, **moved)

    return run


def _format_values(state: State, tensor: Tensor, replica: int) -> str:
    if not state.computes(tensor.dtype):
        return "not computed"
    return np.array2string(state.read(tensor, replica), separator=" ", threshold=100)


_IN_BRANCHES = (
    programs.Sequence,
    programs.Call,
    programs.Repeat,
    programs.RepeatWhileTrue,
    programs.RepeatWhileFalse,
    programs.If,
    programs.Switch,
    programs.WriteUndef,
)


class Lowering:
    """Turns programs into nodes; a program used several times is lowered once."""

    def __init__(self, state: State) -> None:
        self.state = state
        self.nodes: dict[programs.Program, Node] = {}
        self.copies: list[CopyPlan] = []
        self.vertex_sets: list[VertexSet] = []
        self.compute_sets = 0
        self.checked: set[tuple[programs.Program, int]] = set()

    def lower(self, program: programs.Program, path: str = "") -> Node:
        """The node of a program."""
        if program in self.nodes:
            return self.nodes[program]
        name = program.name
        if name is not None:
            path = f"{path}/{name}" if path else name
        make = getattr(self, f"_{type(program).__name__}")
        node: Node = make(program, path)
        self.nodes[program] = node
        return node

    def _leaf_path(self, program: programs.Program, path: str, kind: str) -> str:
        if program.name is not None:
            return path
        leaf = f"{kind}{len(self.state.steps)}"
        return f"{path}/{leaf}" if path else leaf

    # Structure.

    def _Sequence(self, program: programs.Sequence, path: str) -> Node:
        nodes = [self.lower(p, path) for p in program.programs]

        def run(profile: Profile) -> None:
            for node in nodes:
                node(profile)

        return run

    def _Parallel(self, program: programs.Parallel, path: str) -> Node:
        processors = self.state.target.processors
        nodes: dict[int, Node] = {}
        for processor, branch in program.branches.items():
            if processor >= processors:
                raise ProgramError(
                    f"a branch of {path or 'Parallel'!r} is for processor {processor}; the target "
                    f"has processors 0 to {processors - 1}"
                )
            nodes[processor] = self.lower(branch, path)
            self._check_branch(branch, processor, path)

        def run(profile: Profile) -> None:
            begin = end = profile.cycles
            profile.in_branch = True
            for processor, node in nodes.items():
                profile.cycles = begin
                node(profile)
                profile.busy[processor] += profile.cycles - begin
                end = max(end, profile.cycles)
            profile.cycles, profile.in_branch = end, False
            profile.parallel_cycles += end - begin

        return run

    def _check_branch(self, program: programs.Program, processor: int, path: str) -> None:
        """Raises ProgramError for a program that involves another processor."""
        if (program, processor) in self.checked:
            return
        self.checked.add((program, processor))
        if isinstance(program, programs.Execute):
            used = [v.tiles.reshape(-1) for v in program.compute_set.merged()]
        elif isinstance(program, programs.Copy) and not (program.stream or program.remote):
            tensors = [side for pair in program.pairs for side in pair]
            used = [self.state.graph.root.tiles_of(t).reshape(-1) for t in tensors]
        elif isinstance(program, _IN_BRANCHES):
            tested = [getattr(program, part, None) for part in ("predicate", "value")]
            used = [self.state.graph.root.tiles_of(t).reshape(-1) for t in tested if t is not None]
        else:
            raise ProgramError(
                f"a branch of {path or 'Parallel'!r} cannot contain {type(program).__name__}: a "
                "branch computes and copies only on its own processor"
            )
        each = self.state.target.processor_tiles
        others = [t for tiles in used for t in np.unique(tiles) if t // each != processor]
        if others:
            raise ProgramError(
                f"{program.name or 'a copy'!r} is in the branch of processor {processor} of "
                f"{path or 'Parallel'!r} and uses tile {others[0]}, of processor "
                f"{others[0] // each}"
            )
        for part in program.parts():
            self._check_branch(part, processor, path)

    def _Call(self, program: programs.Call, path: str) -> Node:
        return self.lower(program.function, path)

    def _Repeat(self, program: programs.Repeat, path: str) -> Node:
        body, count = self.lower(program.body, path), program.count

        def run(profile: Profile) -> None:
            for _ in range(count):
                body(profile)

        return run

    def _test(
        self, program: programs.Program, scalar: Tensor, path: str
    ) -> Callable[[Profile], int]:
        """Read a control value: it goes to every tile, so that all take the same branch."""
        state = self.state
        step = state.add_step(program, f"{path}/predicate" if path else "predicate", "control")
        flats = [memory[scalar.dtype] for memory in state.memories]
        address = int(scalar.addresses().reshape(-1)[0])
        exchange, target = broadcast_cycles(state.target, scalar), state.target

        def test(profile: Profile) -> int:
            sync = target.sync_cycles if profile.in_branch else target.whole_sync_cycles
            profile.record(step, sync=sync, exchange=exchange)
            values = [int(flat[address]) for flat in flats]
            profile.count_choice(step, values[0])
            if len({*values}) > 1:
                raise ProgramError(
                    f"replicas go different ways at {path!r}: {scalar.name} is "
                    f"{', '.join(map(str, values))}; make it the same on all, as by "
                    "CrossReplicaCopy"
                )
            return values[0]

        return test

    def _while(self, program: Any, path: str) -> Node:
        condition = self.lower(program.condition, path)
        test = self._test(program, program.predicate, path)
        body = self.lower(program.body, path)
        state, runs_while = self.state, program.runs_while

        def run(profile: Profile) -> None:
            for _ in range(state.max_iterations):
                condition(profile)
                if bool(test(profile)) is not runs_while:
                    return
                body(profile)
            raise ProgramError(
                f"loop {path or type(program).__name__!r} ran {state.max_iterations:,} times "
                f"without its predicate ({program.predicate.name}) ending it; raise max_iterations "
                f"of the engine if it should"
            )

        return run

    _RepeatWhileTrue = _while
    _RepeatWhileFalse = _while

    def _If(self, program: programs.If, path: str) -> Node:
        test = self._test(program, program.predicate, path)
        then, otherwise = self.lower(program.then, path), self.lower(program.otherwise, path)

        def run(profile: Profile) -> None:
            (then if test(profile) else otherwise)(profile)

        return run

    _AbortOnCondition = _If

    def _Switch(self, program: programs.Switch, path: str) -> Node:
        test = self._test(program, program.value, path)
        cases = {key: self.lower(p, path) for key, p in program.cases.items()}
        default = self.lower(program.default, path)

        def run(profile: Profile) -> None:
            cases.get(test(profile), default)(profile)

        return run

    # Steps.

    def _Sync(self, program: programs.Sync, path: str) -> Node:
        step = self.state.add_step(program, self._leaf_path(program, path, "sync"), "sync")
        cycles = self.state.target.whole_sync_cycles
        return lambda profile: profile.record(step, sync=cycles)

    def _WriteUndef(self, program: programs.WriteUndef, path: str) -> Node:
        state, tensor = self.state, program.tensor
        self._check_written([tensor], "WriteUndef")
        poison = np.broadcast_to(np.asarray(tensor.dtype.poison), tensor.shape)

        def run(profile: Profile) -> None:
            # Poison, so that a program which still reads it is noticed.
            if state.computes(tensor.dtype):
                state.store(tensor, poison, "WriteUndef")

        return run

    def _Copy(self, program: programs.Copy, path: str) -> Node:
        path = self._leaf_path(program, path, "copy")
        state = self.state
        written = [dst for _, dst in program.pairs if isinstance(dst, Tensor)]
        self._check_written(written, f"copy {path!r}")
        if program.stream is not None:
            return _lower_stream_copy(state, program, path)
        if program.remote is not None:
            return _lower_remote_copy(state, program, path)
        plan = plan_copy(state.graph, state.target, program.pairs, path)
        self.copies.append(plan)
        moves = [
            bind_pair(src, dst, memory)
            for memory in state.memories
            for src, dst in program.pairs
            if src.numel and state.computes(src.dtype)
        ]
        step = state.add_step(program, path, "exchange" if plan.is_exchange else "compute", plan)
        sync = state.target.sync_cycles if plan.is_exchange else 0
        if plan.link_bytes:
            sync = state.target.link_sync_cycles
        link_bytes = plan.link_bytes * len(state.memories)
        exchange, local = plan.exchange_cycles, plan.local_cycles
        tile_cycles = plan.local_per_tile if local else None

        def run(profile: Profile) -> None:
            for move in moves:
                move()
            profile.record(
                step,
                sync=sync,
                exchange=exchange,
                compute=local,
                tile_cycles=tile_cycles,
                link_bytes=link_bytes,
            )

        return run

    def _check_written(self, tensors: list[Tensor], what: str) -> None:
        for tensor in tensors:
            constant = self.state.graph.constant_in(tensor)
            if constant is not None:
                raise ProgramError(f"{what} writes the constant {constant.name!r}")

    def _CrossReplicaCopy(self, program: programs.CrossReplicaCopy, path: str) -> Node:
        """Copy between all pairs of replicas at once, over the links."""
        self._check_written([dst for _, dst in program.pairs], f"copy {path!r}")
        path = self._leaf_path(program, path, "cross replica copy")
        state = self.state
        count = len(state.memories)
        for number in (*program.to, *program.to.values()):
            if number >= count:
                raise ProgramError(f"{path!r}: there are replicas 0 to {count - 1}, got {number}")
        step = state.add_step(program, path, "links")
        src, dst = program.pairs[0]
        target, root = state.target, state.graph.root
        of_tile, to_tile = (
            np.bincount(root.tiles_of(t).reshape(-1), minlength=target.tiles) * t.dtype.size
            for t in (src, dst)
        )
        busiest = max(int(of_tile.max()), int(to_tile.max())) if program.to else 0
        exchange = math.ceil(busiest / target.exchange_bytes_per_cycle)
        each = target.processor_tiles
        by_processor = np.stack([t.reshape(-1, each).sum(1) for t in (of_tile, to_tile)]).max(0)
        moving = {s: r for s, r in program.to.items() if s != r}
        links = np.zeros((count, target.processors, count, target.processors))
        for sender, receiver in moving.items():
            links[sender, :, receiver] += np.diag(by_processor)
        size = src.numel * src.dtype.size * len(moving)
        spent = max(exchange, link_cycles(target, links.reshape(count * target.processors, -1)))

        def run(profile: Profile) -> None:
            if state.computes(src.dtype):
                sent = {r: state.read(src, s) for s, r in program.to.items()}
                for receiver, values in sent.items():
                    state.store(dst, values.reshape(dst.shape), path, receiver)
            profile.record(step, sync=target.link_sync_cycles, exchange=spent, link_bytes=size)

        return run

    def _PrintTensor(self, program: programs.PrintTensor, path: str) -> Node:
        state = self.state
        step = state.add_step(program, self._leaf_path(program, path, "print"), "host")
        tensor = program.tensor
        size, cycles = _measure_link(
            state, tensor.numel, tensor.dtype, state.target.host_write_bytes_per_second
        )

        def run(profile: Profile) -> None:
            for replica in range(len(state.memories)):
                which = f" of replica {replica}" if len(state.memories) > 1 else ""
                shown = _format_values(state, tensor, replica)
                print(f"{program.title}{which}: {shown}", file=state.print_to)
            profile.record(step, sync=state.sync_of_all, host=cycles, to_host_bytes=size)

        return run

    def _ErrorProgram(self, program: programs.ErrorProgram, path: str) -> Node:
        state = self.state

        def run(profile: Profile) -> None:
            line = program.message
            if program.tensor is not None:
                line += f": {_format_values(state, program.tensor, 0)}"
            raise AbortError(
                f"{line} (after {profile.cycles:,.0f} cycles, at {path or 'the start'})"
            )

        return run

    _Abort = _ErrorProgram

    def _is_computed(self, vertices: VertexSet, path: str) -> bool:
        edges = [(vertices.codelet.fields[name], t.dtype) for name, t in vertices.edges.items()]
        if all(self.state.computes(dtype) for _, dtype in edges):
            return True
        if any(edge.writes and not dtype.is_floating for edge, dtype in edges):
            raise ProgramError(
                f"compute set {path!r}: {vertices.codelet.name!r} makes integers from "
                f"floating-point data, so it needs an engine with numerics=True"
            )
        return False

    def _Execute(self, program: programs.Execute, path: str) -> Node:
        state = self.state
        sets = program.compute_set.merged()
        check_compute_set(state.graph, path, sets)
        self.vertex_sets.extend(sets)
        self.compute_sets += 1
        step = state.add_step(program, path, "compute")
        replicas = [
            [BoundVertices(v, memory, state.target, state.rounding) for v in sets if v.count]
            for memory in state.memories
        ]
        bound = replicas[0]
        schedule = _Schedule(bound, state.target.tiles, state.target.workers)
        fixed = [None if b.codelet.data_dependent else (b.cycles(), b.flops()) for b in bound]
        peak = max((state.target.peak_flops(dtype) for v in sets for dtype in v.read), default=0.0)
        computed = [self._is_computed(v, path) for v in sets if v.count]
        # The cycles of each tile, unless they depend on the data.
        fixed_cycles = [costs[0] for costs in fixed if costs is not None]
        known = schedule.tile_cycles(fixed_cycles) if len(fixed_cycles) == len(fixed) else None

        def run_replica(bound: list[BoundVertices], profile: Profile) -> np.ndarray:
            """The cycles of each tile."""
            all_cycles = []
            for b, is_computed, estimates in zip(bound, computed, fixed, strict=True):
                if is_computed or estimates is None:
                    b.load()
                cycles, flops = estimates or (b.cycles(), b.flops())
                all_cycles.append(cycles)
                profile.steps[step].flops += flops
                if is_computed:
                    with state.float_errors(path, b.codelet.name):
                        b.run()
                row = profile.codelets.setdefault(b.codelet.name, CodeletProfile())
                row.vertices += len(cycles)
                row.cycles += float(cycles.sum())
            return schedule.tile_cycles(all_cycles) if known is None else known

        def run(profile: Profile) -> None:
            profile.steps[step].peak_flops = peak
            by_replica = [run_replica(bound, profile) for bound in replicas]
            # The slowest replica counts.
            tile_cycles = np.max(by_replica, axis=0) if known is None else known
            profile.record(step, compute=float(tile_cycles.max()), tile_cycles=tile_cycles)

        return run


class _Schedule:
    """How a compute set's vertices share the workers of their tiles.

    Worker vertices of a tile are dealt in order to its workers, which issue in turn: the tile takes
    `workers` times the longest worker's sum. Codelets that use all workers, or the supervisor, run
    one after another.
    """

    def __init__(self, bound: list[BoundVertices], tiles: int, workers: int) -> None:
        self.tiles, self.workers = tiles, workers
        self.modes = [b.codelet.runs_on for b in bound]
        self.where = [b.vertices.tiles for b in bound]
        dealt = [t for t, mode in zip(self.where, self.modes, strict=True) if mode == "worker"]
        at = np.concatenate([*dealt, np.zeros(0, np.int64)])
        rank = np.empty(len(at), np.int64)
        rank[np.argsort(at, kind="stable")] = ranks(np.bincount(at, minlength=tiles))
        self.slots = at * workers + rank % workers

    def tile_cycles(self, cycles: list[np.ndarray]) -> np.ndarray:
        """Cycles of each tile, [tiles], from those of the vertices of each set."""
        total = np.zeros(self.tiles)
        dealt = []
        for mode, where, spent in zip(self.modes, self.where, cycles, strict=True):
            if mode == "worker":
                dealt.append(spent)
            else:
                factor = self.workers if mode == "workers" else 1
                total += factor * np.bincount(where, weights=spent, minlength=self.tiles)
        if dealt:
            size = self.tiles * self.workers
            sums = np.bincount(self.slots, weights=np.concatenate(dealt), minlength=size)
            total += self.workers * sums.reshape(self.tiles, self.workers).max(1)
        return total
