"""Figures of the experiments, from records and arrays: PNG and SVG, one style, colours for colour-blind readers."""

from collections.abc import Callable, Sequence
from pathlib import Path
from textwrap import fill
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mcvae.report.tables import LABELS, unique
from mcvae.runs.method import label_of, method_named, parse_key
from mcvae.runs.records import Record, Summary, summarise

__all__ = ["FIGURES", "STYLE", "draw", "draw_ring", "passes_of", "spent_on"]

STYLE: Any = {
    "font.size": 9,
    "axes.titlesize": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.alpha": 0.3,
    "grid.linewidth": 0.5,
    "legend.frameon": False,
    "svg.hashsalt": "mcvae",  # the same records give the same file
    "figure.constrained_layout.use": True,
}

Arrays = dict[str, Any]


def draw(experiment: str, title: str, records: Sequence[Record], arrays: Arrays, folder: Path) -> list[Path]:
    """Write `figure.png` and `figure.svg` of an experiment."""
    with mpl.rc_context(STYLE):
        figure = FIGURES[experiment](summarise(records), arrays)
        figure.suptitle(fill(title, int(12 * figure.get_figwidth())), fontsize=11)
        paths = [folder / "figure.png", folder / "figure.svg"]
        figure.savefig(paths[0], dpi=160)
        figure.savefig(paths[1], metadata={"Date": None})
    return paths


def _look(key: str) -> dict[str, Any]:
    method = method_named(key)
    return {"color": method.colour, "marker": method.marker, "markersize": 4, "label": label_of(key)}


def _line(axis: Axes, x: Sequence[float], line: Sequence[Summary], **look: Any) -> None:
    """Means with their deviations over seeds, or, of one seed, with its standard errors."""
    axis.errorbar(x, [s.mean for s in line], [s.spread or 0.0 for s in line], capsize=2, **look)


def _posterior(found: list[Summary], arrays: Arrays) -> Figure:
    """The 2 × 3 panel of Figure 1, with the distance of each method."""
    figure = Figure(figsize=(7.5, 5.4))
    axes = figure.subplots(2, 3, sharex=True, sharey=True).flat
    draw_ring(list(axes), ("vae", "iwae", "realnvp", "a-mcvae", "l-mcvae"), found, arrays)
    figure.supxlabel("$z_1$; numbers are energy distances to the exact posterior (contours), 0 if equal", fontsize=9)
    figure.supylabel("$z_2$", fontsize=9)
    return figure


def draw_ring(axes: Sequence[Axes], methods: Sequence[str], found: list[Summary], arrays: Arrays) -> None:
    """The exact posterior, then the samples of each method over its contours."""
    density, extent = arrays["exact"], (-4, 4, -4, 4)
    axes[0].imshow(density, origin="lower", extent=extent, cmap="Blues", aspect="equal")
    axes[0].set_title("exact posterior")
    distances = {s.method: s for s in found if s.metric == "energy_distance"}
    for method, axis in zip(methods, axes[1:], strict=True):
        axis.contour(density, levels=3, extent=extent, colors="#999999", linewidths=0.6)
        if method in arrays:
            look: Any = {"s": 2, "alpha": 0.35, "linewidths": 0, "rasterized": True}
            axis.scatter(*arrays[method][:1500].T, color=method_named(method).colour, **look)
            summary = distances[method]
            axis.set_title(f"{label_of(method)}: {summary.mean:.4f} ± {summary.spread or 0.0:.4f}")
    for axis in axes:
        axis.set(xlim=(-4, 4), ylim=(-4, 4), aspect="equal")
        axis.grid(visible=False)


def _parameters(found: list[Summary], arrays: Arrays) -> Figure:
    figure = Figure(figsize=(6.5, 4))
    axis = figure.subplots()
    for method in unique(s.method for s in found):
        line = [s for s in found if s.method == method and s.metric == "squared_error"]
        dimensions = [int(s.dataset.removeprefix("ring-")) for s in line]
        errors = [s.standard_error or 0.0 for s in line]
        axis.errorbar(dimensions, [s.mean for s in line], errors, capsize=2, lw=1, **_look(method))
    axis.set(xscale="log", yscale="log", xlabel="dimension d of the latents", ylabel="$\\|\\hat\\theta - \\theta\\|^2$")
    axis.legend(fontsize=8, title="mean over seeds ± standard error", title_fontsize=8)
    return figure


def _boxes(found: list[Summary], arrays: Arrays) -> Figure:
    """Figure 2: log p̂ − log p above, the error of the derivative below."""
    methods = [method for method in unique(s.method for s in found) if f"{method}/log_evidence_error" in arrays]
    figure = Figure(figsize=(8.5, 6.8))
    rows = figure.subplots(2, 1, sharex=True)
    for axis, key in zip(rows, ("log_evidence_error", "derivative_error"), strict=True):
        values, fliers = [arrays[f"{method}/{key}"] for method in methods], {"markersize": 2}
        boxes = axis.boxplot(values, widths=0.6, patch_artist=True, flierprops=fliers)
        for box, method in zip(boxes["boxes"], methods, strict=True):
            box.set(facecolor=method_named(method).colour, alpha=0.5)
        for median in boxes["medians"]:
            median.set_color("black")
        axis.axhline(0, color="#666666", lw=0.8)
    rows[0].set_ylabel("$\\log\\hat p_\\theta(x) - \\log p_\\theta(x)$, nats per datum")
    rows[1].set_ylabel("error of the derivative along\nthe scale of $\\theta_1$, nats")
    rows[1].set_yscale("symlog", linthresh=10)
    rows[1].set_xticks(range(1, len(methods) + 1), [_stacked(label_of(m)) for m in methods], fontsize=7)
    size = len(arrays[f"{methods[0]}/log_evidence_error"])
    figure.supxlabel(
        f"boxes: quartiles of {size} replicates of a batch of 100; the lower axis is logarithmic beyond ±10", fontsize=8
    )
    return figure


def _stacked(label: str) -> str:
    lines = label.replace(", ", "\n").replace("learned backward kernels", "learned\nbackward")
    return lines.replace("control ", "control\n")


def _scores(found: list[Summary], arrays: Arrays) -> Figure:
    """Ours with error bars, the paper's as open rings, a panel per metric in nats and epoch."""
    found = [s for s in found if s.metric in ("negative_elbo", "nll", "nll_minus_vae")]
    columns, methods = unique((s.metric, s.epoch) for s in found), unique(s.method for s in found)[::-1]
    figure = Figure(figsize=(2.2 + 2.6 * len(columns), 1.6 + 0.3 * len(methods)))
    panels = figure.subplots(1, len(columns), sharey=True, squeeze=False)[0]
    for axis, (metric, epoch) in zip(panels, columns, strict=True):
        for s in [s for method in methods for s in found if (s.method, s.metric, s.epoch) == (method, metric, epoch)]:
            height = methods.index(s.method)
            axis.errorbar(s.mean, height, xerr=s.spread or 0.0, capsize=2, **_look(s.method) | {"label": None})
            if s.paper is not None:
                axis.plot(s.paper, height, "o", mfc="none", mec="#666666", ms=8)
        axis.set(title=f"{LABELS[metric]}, {epoch} epochs", xlabel="nats, less is better")
        axis.set_yticks(range(len(methods)), [label_of(m) for m in methods])
        axis.set_ylim(-0.5, len(methods) - 0.5)
    figure.supxlabel("filled: ours, ± deviation over seeds or standard error; open circles: the paper", fontsize=8)
    return figure


def _against_k(found: list[Summary], arrays: Arrays) -> Figure:
    figure = Figure(figsize=(8, 3.8))
    last = max(s.epoch or 0 for s in found)
    for axis, metric in zip(figure.subplots(1, 2), ("negative_elbo", "nll"), strict=True):
        chosen = [s for s in found if s.metric == metric and s.epoch == last]
        langevin = sorted((s for s in chosen if s.method.startswith("l-mcvae")), key=lambda s: _steps(s.method))
        ticks = [_steps(s.method) for s in langevin]
        _line(axis, ticks, langevin, **_look("l-mcvae"))
        for s in chosen:
            if not s.method.startswith("l-mcvae"):
                axis.axhline(s.mean, ls="--", color=method_named(s.method).colour, label=label_of(s.method))
        axis.set(xscale="log", title=f"after {last} epochs")
        axis.set(xlabel="Langevin steps K", ylabel=f"{LABELS[metric]}, nats")
        axis.set_xticks(ticks, [str(k) for k in ticks])
        axis.minorticks_off()
        axis.legend(fontsize=8)
    return figure


def _curves(found: list[Summary], arrays: Arrays) -> Figure:
    figure = Figure(figsize=(8, 3.8))
    for axis, metric in zip(figure.subplots(1, 2), ("validation_negative_elbo", "validation_nll"), strict=True):
        for method in unique(s.method for s in found):
            line = sorted((s for s in found if (s.method, s.metric) == (method, metric)), key=lambda s: s.epoch or 0)
            if line:
                _line(axis, [s.epoch or 0 for s in line], line, lw=1, **_look(method))
        axis.set(xlabel="epoch", ylabel=f"{LABELS[metric]}, nats")
        if axis.has_data():
            axis.legend(fontsize=8)
    return figure


def _steps(key: str) -> int:
    """K of a key, also of a sampler that trains no model; 0 if it has none."""
    return int(key.rpartition("-k")[2]) if "-k" in key else 0


def _benchmark(found: list[Summary], arrays: Arrays) -> Figure:
    """The ELBO of every density against K, above, and against seconds, below."""
    bounds = [s for s in found if s.metric == "elbo"]
    densities, families = unique(s.dataset for s in bounds), unique(_family(s.method) for s in bounds)
    figure = Figure(figsize=(2 + 3 * len(densities), 6))
    rows = figure.subplots(2, len(densities), squeeze=False)
    numbers = sorted({_steps(s.method) for s in bounds})
    for column, density in enumerate(densities):
        upper, lower = rows[:, column]
        for index, family in enumerate(families):
            line = [s for s in bounds if (s.dataset, _family(s.method)) == (density, family)]
            look = {"color": f"C{index}", "marker": "o", "markersize": 4, "lw": 1, "label": family.upper()}
            _line(upper, [_steps(s.method) for s in line], line, **look)
            _line(lower, [s.seconds or 0.0 for s in line], line, **look)
        upper.set(title=density, xlabel="K", xscale="symlog")
        upper.set_xticks(numbers, [str(number) for number in numbers], minor=False)
        lower.set(xlabel="seconds of one core", xscale="log")
    for first in rows[:, 0]:
        first.set_ylabel(LABELS["elbo"])
    rows[0, -1].legend(fontsize=7)
    return figure


def _family(key: str) -> str:
    return key.rpartition("-k")[0] or key


def _frontier(found: list[Summary], arrays: Arrays) -> Figure:
    """NLL below the VAE's by how the budget is spent; a panel per data set and encoder, a marker per budget."""
    last = max(s.epoch or 0 for s in found)
    gains = [s for s in found if s.metric == "nll_minus_vae" and s.epoch == last]
    subjects = unique(s.dataset for s in gains)
    row_of = {s.method: spent_on(s.method) for s in gains}
    rows = [row for row in _SPENT_ON if row in row_of.values()]
    budgets = sorted({passes_of(method) for method in row_of})
    if not subjects:
        figure = Figure(figsize=(6, 1.4))
        figure.text(0.5, 0.35, "no run of the VAE to compare with", ha="center")
        return figure
    figure = Figure(figsize=(2.2 + 2.4 * len(subjects), 1.7 + 0.36 * len(rows)))
    panels = figure.subplots(1, len(subjects), sharey=True, squeeze=False)[0]
    for axis, subject in zip(panels, subjects, strict=True):
        for s in gains:
            if s.dataset == subject:
                index = budgets.index(passes_of(s.method))
                height = len(rows) - rows.index(row_of[s.method]) + 0.16 * (len(budgets) - 1 - 2 * index)
                colour, filled = method_named(s.method).colour, index == len(budgets) - 1
                axis.barh(height, s.mean, 0.3, color=colour, alpha=0.75 if filled else 0.35)
                axis.errorbar(s.mean, height, xerr=s.standard_error or 0.0, color="#333333", capsize=2, lw=1)
        axis.axvline(0, color="#666666", lw=0.8)
        axis.set(title=subject.replace(", ", "\n"), xlabel="NLL − VAE's, nats")
        axis.set_yticks(range(len(rows), 0, -1), rows)
        axis.grid(visible=False, axis="y")
    shades = ", ".join(f"{'dark' if budget == budgets[-1] else 'light'}: {budget}" for budget in budgets)
    figure.supxlabel(
        f"decoder passes per image and step, {shades}; further left is better; ± standard error", fontsize=8
    )
    return figure


_SPENT_ON = (
    "samples: IWAE",
    "4 chains: L-MCVAE",
    "2 chains: L-MCVAE",
    "1 chain: L-MCVAE",
    "1 chain: A-MCVAE",
    "1 chain: CMCD",
)
"""Rows of the frontier's figure, from many samples to many steps."""


def spent_on(key: str) -> str:
    """What a method spends its budget on, as in `_SPENT_ON`."""
    config, method = parse_key(key), method_named(key)
    chains = config.num_samples or 1
    return f"{chains} chain{'s' * (chains > 1)}: {method.title}" if method.annealed else f"samples: {method.title}"


def passes_of(key: str) -> int:
    """Decoder passes per image and step."""
    return method_named(key).cost(parse_key(key))


FIGURES: dict[str, Callable[[list[Summary], Arrays], Figure]] = {
    "toy-posterior": _posterior,
    "toy-parameters": _parameters,
    "ppca": _boxes,
    "mnist": _scores,
    "celeba": _scores,
    "cifar10": _scores,
    "k-sweep": _against_k,
    "training-curves": _curves,
    "posteriors": _benchmark,
    "frontier": _frontier,
}
"""The figure of each experiment."""
