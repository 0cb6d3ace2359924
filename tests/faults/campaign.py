"""Kill trainings, resume them, and compare their results with uninterrupted ones."""

from __future__ import annotations

import math
import random
import shutil
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from dynsparse.training.checkpoint import read_extra

sys.path.insert(0, str(Path(__file__).parent))
from sizes import TEXT
from trainings import Server, begin, checkpoints, difference, outcome, with_last_epoch

KILLS = ("before", "torn", "power")
TOO_LATE = ", too late"


@dataclass(frozen=True)
class Case:
    """A kill at a file operation, or after a fraction of the duration of a training.

    `again` is the file operation at which the first resume is killed, too.
    """

    kind: str = "before"
    at: int | None = None
    after: float | None = None
    again: int | None = None


@dataclass
class Outcomes:
    """Number of kills, and the failures found after them."""

    kills: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    @property
    def landed(self) -> int:
        """Kills that hit before the training had ended."""
        return sum(number for name, number in self.kills.items() if not name.endswith(TOO_LATE))


def cases(app: str, count: int, operations: int) -> Iterator[Case]:
    """Make `count` cases: 60 % at evenly spaced file operations, 20 % that also kill the resume, 20
    % at random times."""
    draw = random.Random(f"{app} {count}")
    spread = 6 * count // 10
    for number in range(spread):
        # As often as there are operations, each way; the ways are shifted where they are fewer.
        at = 1 + number * operations // spread if spread < operations else 1 + number % operations
        way = number + number // operations
        yield Case(KILLS[way % len(KILLS)], at=at)
    twice = count // 10
    for number in range(twice):
        at = operations // 3 + number * (operations - operations // 3) // twice
        yield Case(draw.choice(KILLS), at=at, again=draw.randint(1, operations // 4))
    for _ in range(count - spread - 2 * twice):
        yield Case(after=draw.random())


def campaign(server: Server, app: str, folder: Path, count: int) -> Outcomes:
    """Kill `count` trainings in `folder`; compare each one's end with an uninterrupted one's."""
    (folder / "text.txt").write_text(TEXT)
    seconds = math.inf
    for name in ("warm", "reference"):
        reference = folder / name
        reference.mkdir()
        begun = time.perf_counter()
        whole = server.run(app, reference, **begin(app, reference))
        seconds = min(seconds, time.perf_counter() - begun)
        assert whole["error"] is None
    expected = outcome(app, reference)
    outcomes = Outcomes()
    for number, case in enumerate(_all_cases(app, count, whole["count"], outcomes)):
        place = folder / f"{number}"
        place.mkdir()
        try:
            problem = _survives(server, app, place, case, seconds, outcomes.kills)
            found = with_last_epoch(outcome(app, place), expected)
            problem = problem or difference(expected, found)
        except Exception as error:
            problem = f"{type(error).__name__}: {error}"
        if problem:
            outcomes.wrong.append(f"{app}, {case}: {problem}")
        else:
            shutil.rmtree(place)
    return outcomes


def _all_cases(app: str, count: int, operations: int, outcomes: Outcomes) -> Iterator[Case]:
    """Yield `cases`, and replacements for kills that hit after the training had ended."""
    yield from cases(app, count, operations)
    draw = random.Random(app)
    while outcomes.landed + len(outcomes.wrong) < count:
        yield Case(draw.choice(KILLS), at=draw.randint(1, operations))


def _survives(
    server: Server, app: str, place: Path, case: Case, seconds: float, kills: Counter[str]
) -> str | None:
    """Return what is wrong with the files after the kills or with the resumed training, or None."""
    after = None if case.after is None else case.after * seconds
    first = server.run(app, place, kind=case.kind, at=case.at, after=after, **begin(app, place))
    name = "at random" if case.at is None else case.kind
    if problem := _killed(first, name, kills):
        return problem
    for file in checkpoints(app, place):
        read_extra(file)
    if case.again is not None:
        again = server.resume(app, place, kind=case.kind, at=case.again)
        if problem := _killed(again, f"{name}, of a resume", kills):
            return problem
    last = server.resume(app, place)
    return last["error"] if last["status"] == 0 else f"status {last['status']}"


def _killed(answer: dict[str, object], name: str, kills: Counter[str]) -> str | None:
    if answer["status"] == -9:
        kills[name] += 1
        return None
    if answer["error"] is None and answer["status"] == 0:
        kills[name + TOO_LATE] += 1
        return None
    return f"ended with {answer['error']}, status {answer['status']}"


def main(arguments: Sequence[str]) -> int:
    """`campaign.py FOLDER COUNT`: that many kills over all applications; 1 if one did harm."""
    folder, count = Path(arguments[0]), int(arguments[1])
    wrong: list[str] = []
    with Server() as server:
        for app in ("mnist", "lm"):
            place = folder / app
            place.mkdir(parents=True)
            begun = time.perf_counter()
            found = campaign(server, app, place, count // 2)
            wrong += found.wrong
            for name, number in sorted(found.kills.items()):
                print(f"{app}: {number} kills {name}")
            print(f"{app}: {len(found.wrong)} of {found.landed} did harm", end=", ")
            print(f"{time.perf_counter() - begun:.0f} s", flush=True)
    print("\n".join(wrong))
    return bool(wrong)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
