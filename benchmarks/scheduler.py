"""How fast the scheduler is, and whether its memory stays flat. Standard library only; needs one core and no GPU.

    python benchmarks/scheduler.py                       groups a second with 1,000,000 prompts
    python benchmarks/scheduler.py memory --groups 10_000_000    resident memory over a long run
    python benchmarks/scheduler.py day                   24 hours at 50 groups a second (4,320,000): memory, checkpoints, books

A group is one round of K = 4 completions: next, deliver (which judges), take (which weighs) and publish are all counted. Pass
rates are .95, .5, .1 and .005 in equal parts; up to 64 rounds are in flight and come back in random order. Exits with 1 when
a target is missed: 10,000 groups a second; resident memory after the last million groups within 4 MB of that after the first;
no checkpoint of the day more than 10 % larger than the largest of the first ten. In `day` every attempt carries its completion
of 16 tokens, as it does in a run, and a checkpoint is taken twice an hour.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from random import Random
from time import perf_counter, process_time

from nevergiveup.events import Event, EventSink, EventWriter
from nevergiveup.scheduler import Scheduler
from nevergiveup.strategies import FixedK, NeverGiveUp, Strategy
from nevergiveup.types import Attempt, Completion, Prompt

PASS_RATES = (0.95, 0.5, 0.1, 0.005)
TARGET_GROUPS_PER_S = 10_000
TARGET_GROWTH_MB = 4.0


def drive(scheduler: Scheduler, seed: int = 0, n_tokens: int = 0) -> Iterator[None]:
    """Plays the engine, the grader and the trainer; yields after every group that came back."""
    rng = Random(seed)
    in_flight = []
    n_steps = 0
    while True:
        request = scheduler.next()
        if request is not None:
            in_flight.append(request)
            if len(in_flight) < 64:
                continue
        i = rng.randrange(len(in_flight))
        in_flight[i], in_flight[-1] = in_flight[-1], in_flight[i]
        request = in_flight.pop()
        pass_rate = PASS_RATES[int(request.prompt.id) % 4]
        version = scheduler.version
        completion = None
        if n_tokens:
            logprobs = tuple(-rng.random() for _ in range(n_tokens))
            completion = Completion(tuple(range(n_tokens)), logprobs, "", "stop", version, version)
        scheduler.deliver(
            request.id, [Attempt(int(rng.random() < pass_rate), version, completion) for _ in range(request.n)]
        )
        if scheduler.take() is not None:
            n_steps += 1
            scheduler.publish(n_steps)
        yield


def speed(strategy: Strategy, prompts: list[Prompt], n_groups: int, sink: EventSink | None) -> float:
    """Groups a second of processor time, the driver's own work (random rewards) included."""
    run = drive(Scheduler(strategy, prompts, n_groups=64, on_event=sink))
    for _ in range(2000):
        next(run)
    begin = process_time()
    for _ in range(n_groups):
        next(run)
    return n_groups / (process_time() - begin)


def ignore(event: Event) -> None:
    pass


def measure_speed(n_prompts: int, n_groups: int) -> bool:
    begin = perf_counter()
    prompts = [Prompt(str(i)) for i in range(n_prompts)]
    print(f"{n_prompts:,} prompts made in {perf_counter() - begin:.1f} s")
    begin = perf_counter()
    Scheduler(NeverGiveUp(), prompts, n_groups=64)
    print(f"scheduler over them made in {perf_counter() - begin:.2f} s\n")

    slowest = float("inf")
    with tempfile.TemporaryDirectory() as folder:
        writer = EventWriter(Path(folder) / "events.jsonl", perf_counter)
        sinks: list[tuple[str, EventSink | None]] = [("none", None), ("null", ignore), ("file", writer.write)]
        for name, strategy in (("ngu", NeverGiveUp()), ("fixed", FixedK())):
            for sink_name, sink in sinks:
                rate = speed(strategy, prompts, n_groups, sink)
                slowest = min(slowest, rate)
                print(f"{name:5}  events to {sink_name:4}  {rate:9,.0f} groups/s")
        writer.close()

    print(f"\nslowest {slowest:,.0f} groups/s, target {TARGET_GROUPS_PER_S:,}")
    return slowest >= TARGET_GROUPS_PER_S


def resident_mb() -> float:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) / 1024
    raise OSError("no resident size in /proc/self/status: this measurement needs Linux")


def measure_memory(n_prompts: int, n_groups: int) -> bool:
    scheduler = Scheduler(NeverGiveUp(), [Prompt(str(i)) for i in range(n_prompts)], n_groups=64, on_event=ignore)
    run = drive(scheduler)
    sizes: list[float] = []
    million = min(1_000_000, n_groups)
    print(f"at the start: {resident_mb():.1f} MB")
    while len(sizes) * million < n_groups:
        begin = process_time()
        for _ in range(million):
            next(run)
        scheduler.check_balance()
        sizes.append(resident_mb())
        rate = million / (process_time() - begin)
        print(
            f"{len(sizes) * million:>11,} groups  epoch {scheduler.epoch:>3}  {sizes[-1]:.1f} MB  {rate:,.0f}/s",
            flush=True,
        )
    growth = sizes[-1] - sizes[0]
    print(f"growth after the first million: {growth:+.1f} MB, limit {TARGET_GROWTH_MB} MB")
    return growth <= TARGET_GROWTH_MB


def measure_day(n_prompts: int, n_groups: int) -> bool:
    scheduler = Scheduler(NeverGiveUp(), [Prompt(str(i)) for i in range(n_prompts)], n_groups=64, on_event=ignore)
    run = drive(scheduler, n_tokens=16)
    sizes: list[float] = []
    resident: list[float] = []
    for half_hour in range(1, 2 * 24 + 1):
        for _ in range(n_groups // 48):
            next(run)
        scheduler.check_balance()
        resident.append(resident_mb())
        sizes.append(len(json.dumps(scheduler.state_dict())) / 1e6)
        if half_hour % 4 == 0:
            print(
                f"{half_hour // 2:>2} h  {half_hour * (n_groups // 48):>9,} groups  epoch {scheduler.epoch:>3}  resident "
                f"{resident[-1]:.1f} MB  checkpoint {sizes[-1]:.3f} MB",
                flush=True,
            )
    early, late = max(sizes[:10]), max(sizes[10:])
    growth = resident[-1] - resident[9]
    print(f"largest checkpoint: {early:.3f} MB of the first ten, {late:.3f} MB later on")
    print(f"resident after the tenth checkpoint and at the end: {resident[9]:.1f} and {resident[-1]:.1f} MB")
    return late <= 1.1 * early and growth <= TARGET_GROWTH_MB


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("what", nargs="?", choices=["speed", "memory", "day"], default="speed")
    parser.add_argument(
        "--prompts", type=int, help="size of the data set: 1,000,000 for speed, 100,000 for memory, 40,000 for day"
    )
    parser.add_argument(
        "--groups", type=int, help="groups to play: 100,000 for each speed, 10,000,000 for memory, 4,320,000 for day"
    )
    args = parser.parse_args()
    if args.what == "speed":
        met = measure_speed(args.prompts or 1_000_000, args.groups or 100_000)
    elif args.what == "day":
        met = measure_day(args.prompts or 40_000, args.groups or 4_320_000)
    else:
        met = measure_memory(args.prompts or 100_000, args.groups or 10_000_000)
    sys.exit(0 if met else 1)


if __name__ == "__main__":
    main()
