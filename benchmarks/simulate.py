"""How fast the simulator is on one core, and from which size of cluster the scheduler itself would be the bottleneck.

    python benchmarks/simulate.py [--steps 10000] [--prompts 1000000]

The first part is NGU with K = 4, p = .95 on the built-in mix of prompts, batches of 64 groups, no limit but the steps.
"""

from __future__ import annotations

import argparse
import resource

from nevergiveup.simulate import MIX, Cluster, Plan, Population, cluster_rows, simulate
from nevergiveup.strategies import NeverGiveUp


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--prompts", type=int, default=1_000_000)
    options = parser.parse_args()

    print("  GPUs     slots  completions/s  rounds/s  microseconds a round  scheduler, share of a core")
    for row in cluster_rows((8, 64, 512, 4096)):
        print(
            f"{row['gpus']:6,}{row['slots']:10,}{row['completions_per_s']:15,.0f}{row['rounds_per_s']:10,.0f}"
            f"{row['microseconds_per_round']:22.1f}{row['scheduler']:28.4f}"
        )

    population = Population.of_mix(MIX, options.prompts)
    plan = Plan(n_groups=64, steps=options.steps, learning=2.0)
    result = simulate(NeverGiveUp(k=4, p=0.95), population, Cluster(engines=8, slots=256), plan)
    memory_mb = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    each, scheduler = (1e6 * seconds / result.rounds for seconds in (result.wall_s, result.scheduler_s))
    print(
        f"{options.prompts:,} prompts, {result.steps:,} steps of 64 groups: {result.wall_s:.0f} s for {result.rounds:,} rounds "
        f"({each:.0f} microseconds each, {scheduler:.0f} of them in the scheduler), {memory_mb:,.0f} MB; "
        f"{result.seconds / 3600:,.0f} virtual hours"
    )


if __name__ == "__main__":
    main()
