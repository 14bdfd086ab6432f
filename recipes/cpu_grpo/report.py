"""The table and the plot of all runs of a folder: `python recipes/cpu_grpo/report.py out/cpu_grpo`."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

COLUMNS = (
    "run", "seed", "trainer", "sessions", "held-out reward, first", "last", "log-probability gap, mean", "max",
    "respelt turns", "minutes",
)  # fmt: skip
COLOURS = {
    "agent": "tab:blue",
    "agent_slime": "tab:purple",
    "pi": "tab:green",
    "shuffled_rewards": "tab:red",
    "rerender": "tab:orange",
}


def write(out: Path) -> None:
    """table.md, and curves.png where matplotlib is there, of `out`/runs/*.json."""
    runs = [json.loads(path.read_text()) for path in sorted((out / "runs").glob("*.json"))]
    (out / "table.md").write_text(table(runs))
    print(table(runs), end="")
    try:
        plot(runs, out / "curves.png")
    except ImportError:
        print("no plot: pip install 'polar-plugin[cpu-grpo]'")


def table(runs: Sequence[Any]) -> str:
    """One row a run, as Markdown."""
    lines = [COLUMNS, ["---"] * len(COLUMNS), *(_row(run) for run in runs)]
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


def _row(run: Any) -> list[str]:
    rewards, gaps = list(run["held_out"].values()), [step["gap"] for step in run["steps"]]
    return [
        run["name"],
        str(run["seed"]),
        run["trainer"],
        str(len(run["steps"]) * run["sessions"]),
        f"{rewards[0]:.2f}",
        f"{rewards[-1]:.2f}",
        f"{sum(gaps) / len(gaps):.1e}",
        f"{max(step['gap_max'] for step in run['steps']):.1e}",
        "-" if run["respelt"] is None else f"{run['respelt']:.0%}",
        f"{run['seconds'] / 60:.1f}",
    ]


def plot(runs: Sequence[Any], path: Path) -> None:
    """Held-out reward (solid) and reward of training rollouts (faint) by rollout; the gap below."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(2, 1, figsize=(8, 7), sharex=True, height_ratios=(3, 1))
    for run in runs:
        colour = COLOURS.get(run["name"], "black")
        held = {int(trained): reward for trained, reward in run["held_out"].items()}
        label = f"{run['name']}, seed {run['seed']}"
        above.plot(list(held), list(held.values()), color=colour, marker="o", label=label)
        above.plot(range(len(run["rewards"])), run["rewards"], color=colour, alpha=0.25)
        below.semilogy([step["gap"] for step in run["steps"]], color=colour)
    above.set(ylabel="reward: held-out (dots), training (faint)", ylim=(0, 1))
    above.axhline(0.3, color="grey", linestyle=":")
    above.axhline(0.8, color="grey", linestyle=":")
    above.legend(fontsize=8)
    below.set(xlabel="rollouts trained on", ylabel="mean |recorded -\nrecomputed|, nats")
    figure.tight_layout()
    figure.savefig(path, dpi=120)
    pyplot.close(figure)


if __name__ == "__main__":
    write(Path(sys.argv[1]))
