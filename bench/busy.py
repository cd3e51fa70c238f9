"""Training steps beside other programs that keep the processor busy.

With n busy processes on c cores, a run's fair share is its quiet rate times c / (c + n). Fails if it gets less than
0.9 of that for n = 1, 2 or 4.
"""

import argparse
import os
import statistics
import subprocess
import sys

from training_run import measure_steps

BOUND = 0.9


def tokens_per_second(tessera: str, busy: int, steps: int, arguments: list[str]) -> float:
    others = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(busy)]
    try:
        options = ["configs/debugmodel.toml", "--training.device=cpu", f"--steps={steps}", *arguments]
        return measure_steps(tessera, options)["tokens_per_s"]
    finally:
        for other in others:
            other.kill()
            other.wait()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tessera", required=True)
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options, arguments = parser.parse_known_args()
    cores = len(os.sched_getaffinity(0))
    rates: dict[int, list[float]] = {busy: [] for busy in (0, 1, 2, 4)}
    for _ in range(options.rounds):
        for busy, of_busy in rates.items():
            of_busy.append(tokens_per_second(options.tessera, busy, options.steps, arguments))
    missed = False
    print(f"{cores} cores, medians of {options.rounds} rounds in turns")
    print(f"{'busy processes':>15} {'tokens/s':>9} {'fair share':>10} {'of it':>6}")
    quiet = statistics.median(rates[0])
    for busy, of_busy in rates.items():
        rate, fair = statistics.median(of_busy), quiet * cores / (cores + busy)
        print(f"{busy:15} {rate:9.0f} {fair:10.0f} {rate / fair:6.2f}")
        missed = missed or rate < BOUND * fair
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
