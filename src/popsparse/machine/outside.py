"""Steps that reach beyond the tiles: streams, remote buffers, other replicas, messages."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from popsparse.machine import program as programs
from popsparse.machine.errors import AbortError, ProgramError
from popsparse.machine.exchange import link_cycles
from popsparse.machine.profile import Profile
from popsparse.machine.state import Node, State
from popsparse.machine.tensor import Tensor


def _cycles(state: State, numel: int, dtype: Any, rate: float) -> tuple[int, float]:
    """Bytes of all replicas, and what moving them at once takes."""
    size = numel * dtype.size * len(state.memories)
    return size, float(math.ceil(size / rate * state.target.clock_hz))


def stream_copy(state: State, program: programs.Copy, path: str) -> Node:
    """The replicas share the host's link."""
    stream = program.stream
    assert stream is not None
    step = state.add_step(path, "host")
    src, dst = program.pairs[0]
    target = state.target
    up = stream.to_device
    rate = target.host_read_bytes_per_second if up else target.host_write_bytes_per_second
    size, cycles = _cycles(state, stream.numel, stream.dtype, rate)
    flat = (dst if up else src).flatten()

    def run(profile: Profile) -> None:
        if state.computes(stream.dtype):
            for replica in range(len(state.memories)):
                if up:
                    state.write(flat, state.host.fetch(stream), replica)
                else:
                    state.host.deliver(stream, state.read(flat, replica))
        profile.record(
            step,
            sync=state.sync_of_all,
            host=cycles,
            from_host_bytes=size if up else 0,
            to_host_bytes=0 if up else size,
        )

    return run


def remote_copy(state: State, program: programs.Copy, path: str) -> Node:
    """Each processor has memory of its own beside it, so replicas do not wait for each other."""
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
            f"remote buffer {buffer.name!r} is beside one processor: {tensor.name} and what else "
            f"is copied must lie on tiles of it, got those of processors "
            f"{sorted({*processors, *home})}"
        )
    step = state.add_step(path, "remote")
    target = state.target
    rate = target.remote_read_bytes_per_second if up else target.remote_write_bytes_per_second
    size = buffer.numel * buffer.dtype.size
    cycles = float(math.ceil(size / rate * target.clock_hz))
    moved = size * len(state.memories)
    flat, index = tensor.flatten(), program.index

    def row(replica: int) -> int:
        if index is None:
            return 0
        found = int(state.read(index, replica).reshape(-1)[0])
        if not 0 <= found < buffer.rows:
            raise ProgramError(
                f"{path!r}: remote buffer {buffer.name!r} has rows 0 to {buffer.rows - 1}, got "
                f"{found}"
            )
        return found

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
        profile.record(
            step,
            sync=state.sync_of_all,
            host=cycles,
            from_remote_bytes=moved if up else 0,
            to_remote_bytes=0 if up else moved,
        )

    return run


def cross_replica_copy(state: State, program: programs.CrossReplicaCopy, path: str) -> Node:
    """All pairs of replicas at once, over the links."""
    count = len(state.memories)
    for number in (*program.to, *program.to.values()):
        if number >= count:
            raise ProgramError(f"{path!r}: there are replicas 0 to {count - 1}, got {number}")
    step = state.add_step(path, "links")
    src, dst = program.pairs[0]
    target, root = state.target, state.graph.root
    of_tile, to_tile = (
        np.bincount(root.tiles_of(t).reshape(-1), minlength=target.tiles) * t.dtype.size
        for t in (src, dst)
    )
    busiest = max(int(of_tile.max()), int(to_tile.max())) if program.to else 0
    exchange = math.ceil(busiest / target.exchange_bytes_per_cycle)
    each = target.processor_tiles
    by_processor = np.stack([t.reshape(-1, each).sum(1) for t in (of_tile, to_tile)])
    # A replica's processor sends to one other and receives from one.
    links = np.diag(by_processor.max(0)).astype(float)
    moving = {s: r for s, r in program.to.items() if s != r}
    size = src.numel * src.dtype.size * len(moving)
    spent = max(exchange, link_cycles(target, links) if moving else 0)

    def run(profile: Profile) -> None:
        if state.computes(src.dtype):
            sent = {r: state.read(src, s) for s, r in program.to.items()}
            for receiver, values in sent.items():
                state.store(dst, values.reshape(dst.shape), path, receiver)
        profile.record(step, sync=target.link_sync_cycles, exchange=spent, link_bytes=size)

    return run


def print_tensor(state: State, program: programs.PrintTensor, path: str) -> Node:
    step = state.add_step(path, "host")
    tensor = program.tensor
    size, cycles = _cycles(
        state, tensor.numel, tensor.dtype, state.target.host_write_bytes_per_second
    )

    def run(profile: Profile) -> None:
        for replica in range(len(state.memories)):
            which = f" of replica {replica}" if len(state.memories) > 1 else ""
            shown = _shown(state, tensor, replica)
            print(f"{program.title}{which}: {shown}", file=state.print_to)
        profile.record(step, sync=state.sync_of_all, host=cycles, to_host_bytes=size)

    return run


def end(state: State, program: programs.ErrorProgram, path: str) -> Node:
    """Raises AbortError."""

    def run(profile: Profile) -> None:
        line = program.message
        if program.tensor is not None:
            line += f": {_shown(state, program.tensor, 0)}"
        raise AbortError(f"{line} (after {profile.cycles:,.0f} cycles, at {path or 'the start'})")

    return run


def _shown(state: State, tensor: Tensor, replica: int) -> str:
    if not state.computes(tensor.dtype):
        return "not computed"
    return np.array2string(state.read(tensor, replica), separator=" ", threshold=100)
