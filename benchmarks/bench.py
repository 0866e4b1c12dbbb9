"""What a training step and a likelihood cost, against the algorithms as the paper writes them.

Rounds are interleaved in one process and ratios are paired by round, because machines are noisy. Before anything is
timed, package and reference must give the same weights and gradients from the same noise.

    python benchmarks/bench.py [--rounds 7] [--write docs/performance.md]
"""

import argparse
import copy
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import reference
import torch

import mcvae
from mcvae.models import LatentVariableModel, build_model
from mcvae.models.networks import UpsampledConv2d

LATENT, LEAPFROG = 64, 3
STEP, STEP_HMC = 2.0**-7, 2.0**-4  # exact in float32 and float64


class Counted(torch.nn.Module):
    """A decoder that counts the rows it sees."""

    def __init__(self, decoder: torch.nn.Module):
        super().__init__()
        self.decoder, self.calls = decoder, 0

    def forward(self, z: torch.Tensor):
        self.calls += 1
        return self.decoder(z)


class Problem:
    """MNIST's network and shape of data, twice: as the package builds it, and as one would write it down.

    The plain one upsamples first and convolves then, and has torch's default memory layout. Both compute the same.
    """

    def __init__(self, batch: int, network: str = "conv"):
        torch.manual_seed(0)
        self.x = (torch.rand(batch, 1, 28, 28) < 0.3).float()
        self.ours = build_model((1, 28, 28), LATENT, network=network)
        self.plain = written_down(self.ours)

    def double(self) -> "Problem":
        """Everything in float64, where rounding cannot hide a difference."""
        return self._to(torch.float64)

    def float(self) -> "Problem":
        return self._to(torch.float32)

    def _to(self, dtype: torch.dtype) -> "Problem":
        torch.set_default_dtype(dtype)
        self.x, self.ours, self.plain = self.x.to(dtype), self.ours.to(dtype), self.plain.to(dtype)
        return self

    def gradients(self, model: LatentVariableModel, loss: Callable[[mcvae.Bridge], torch.Tensor], **options):
        return torch.autograd.grad(loss(model.bridge(self.x, **options)), list(model.parameters()))


def written_down(model: LatentVariableModel) -> LatentVariableModel:
    """The same function of the same weights by torch's own layers."""
    model = copy.deepcopy(model)
    layers: list[torch.nn.Module] = []
    for layer in model.decoder.network:
        if isinstance(layer, UpsampledConv2d):
            convolution = torch.nn.Conv2d(layer.in_channels, layer.out_channels, 3, padding=1)
            convolution.load_state_dict(layer.state_dict())
            layers += [torch.nn.Upsample(scale_factor=2), convolution]
        else:
            layers.append(layer)
    model.decoder.network = torch.nn.Sequential(*layers)
    return model.to(memory_format=torch.contiguous_format)


def source() -> torch.Generator:
    return torch.Generator().manual_seed(1)


def objective(name: str, k: int = 0, samples: int = 1) -> mcvae.AnnealedEstimator:
    steps = mcvae.FixedStepSizes(k, STEP)
    return {
        "vae": lambda: mcvae.recipes.vae(samples),
        "iwae": lambda: mcvae.recipes.iwae(samples),
        "l-mcvae": lambda: mcvae.recipes.l_mcvae(k, LATENT, interior=True, step_sizes=steps, num_samples=samples),
        "a-mcvae": lambda: mcvae.recipes.a_mcvae(k, LATENT, step_sizes=steps, num_samples=samples),
        "uha": lambda: mcvae.recipes.uha(k, LATENT, step_sizes=steps, num_samples=samples),
    }[name]()


def by_package(estimator: mcvae.AnnealedEstimator):
    return lambda bridge: estimator(bridge, generator=source()).loss.mean()


def by_reference(k: int, samples: int, adjusted: bool):
    return lambda bridge: reference.langevin_loss(bridge, samples, k, STEP, adjusted, source())


def ais_by_package(bridge: mcvae.Bridge, samples: int, k: int) -> torch.Tensor:
    return mcvae.estimate_log_evidence(
        bridge.log_joint,
        bridge.initial,
        kernel=mcvae.hmc(LEAPFROG),
        schedule=mcvae.LinearSchedule(k, interior=True),
        num_samples=samples,
        step_size=STEP_HMC,
        generator=source(),
    ).log_weights


def timed(cases: dict[str, Callable[[], object]], rounds: int) -> dict[str, list[float]]:
    """Seconds of every case in every round, after one to warm up."""
    seconds: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(rounds + 1):
        for name, run in cases.items():
            start = time.perf_counter()
            run()
            if number:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def ratio(seconds: dict[str, list[float]], slow: str, fast: str) -> float:
    return statistics.median(a / b for a, b in zip(seconds[slow], seconds[fast], strict=True))


def relative(ours, theirs) -> float:
    return max(float((a - b).norm() / b.norm()) for a, b in zip(ours, theirs, strict=True))


def distance(ours, theirs) -> float:
    """Relative difference of whole gradients."""
    difference = torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in theirs]).norm())


def check(name: str, difference: float) -> float:
    print(f"{name}: differs from the reference by {difference:.1e} (relative, float64)", file=sys.stderr)
    if not difference < 1e-8:
        raise SystemExit("the two do not compute the same; timings would mean nothing")
    return difference


def training_steps(rounds: int, batch: int) -> dict:
    """Seconds per training step (bound and gradient) of every recipe, and of the reference."""
    problem = Problem(batch)
    described = {
        "VAE": ("vae", 0, 1),
        "IWAE, 10 samples": ("iwae", 0, 10),
        "L-MCVAE, K=5": ("l-mcvae", 5, 1),
        "L-MCVAE, K=10": ("l-mcvae", 10, 1),
        "A-MCVAE, K=3, 5 samples": ("a-mcvae", 3, 5),
        "A-MCVAE, K=5, 5 samples": ("a-mcvae", 5, 5),
        "UHA, K=5": ("uha", 5, 1),
    }
    losses = {name: by_package(objective(*settings)) for name, settings in described.items()}
    references = {
        "VAE, reference": losses["VAE"],
        "L-MCVAE, K=5, reference": by_reference(5, 1, adjusted=False),
        "A-MCVAE, K=5, 5 samples, reference": by_reference(5, 5, adjusted=True),
    }
    rounding, small = {}, Problem(20)  # the reference holds gigabytes
    for name in ("L-MCVAE, K=5", "A-MCVAE, K=5, 5 samples"):
        small.double()
        ours = small.gradients(small.ours, by_package(objective(*described[name])))  # temperatures in float64, too
        check(name, relative(ours, small.gradients(small.plain, references[f"{name}, reference"])))
        ours = small.float().gradients(small.ours, losses[name])
        theirs = small.gradients(small.ours, references[f"{name}, reference"])
        itself = small.gradients(small.plain, references[f"{name}, reference"])
        rounding[name] = {"ours": distance(ours, theirs), "reference, other layout": distance(itself, theirs)}
    flow = build_model((1, 28, 28), LATENT, flow="realnvp")
    cases = {name: lambda loss=loss: problem.gradients(problem.ours, loss) for name, loss in losses.items()}
    cases["VAE with RealNVP"] = lambda: problem.gradients(flow, losses["VAE"])
    cases |= {name: lambda loss=loss: problem.gradients(problem.plain, loss) for name, loss in references.items()}
    passes = {"VAE with RealNVP": 1}
    for name, loss in (losses | references).items():
        model = problem.plain if name in references else problem.ours
        counted = LatentVariableModel(model.encoder, Counted(model.decoder))
        loss(counted.bridge(problem.x))
        passes[name] = counted.decoder.calls
    seconds = timed(cases, rounds)
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "decoder_passes": passes,
        "times_a_vae_step": {name: ratio(seconds, name, "VAE") for name in seconds},
        "reference_over_ours": {
            name.removesuffix(", reference"): ratio(seconds, name, name.removesuffix(", reference"))
            for name in references
        },
        "l_mcvae_over_reference_vae": ratio(seconds, "L-MCVAE, K=5", "VAE, reference"),
        "rounding": rounding,
    }


def likelihood(problem: Problem, samples: int = 10, k: int = 5) -> torch.Tensor:
    """AIS-HMC by the paper's short protocol: 10 chains of 5 moves of 3 leapfrogs."""
    with torch.no_grad():
        return ais_by_package(problem.ours.bridge(problem.x), samples, k)


def reference_likelihood(problem: Problem, samples: int = 10, k: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return reference.ais_hmc(problem.plain.bridge(problem.x), samples, k, STEP_HMC, LEAPFROG, source())


def evaluation(rounds: int, batch: int) -> dict:
    """AIS-HMC likelihoods, both with freed memory kept."""
    problem = Problem(batch).double()
    check("AIS-HMC", relative([likelihood(problem)], [reference_likelihood(problem)]))
    problem.float()
    cases = {"ours": lambda: likelihood(problem), "reference": lambda: reference_likelihood(problem)}
    seconds = timed(cases, rounds)
    return {
        "images_per_second": {name: batch / statistics.median(times) for name, times in seconds.items()},
        "reference_over_ours": ratio(seconds, "reference", "ours"),
    }


def likelihoods() -> dict:
    """Images per second and peak memory of AIS-HMC against moves, chains and batch, each in a process of its own."""
    cases = {f"{k} moves of 10 chains, batch 100": (10, k, 100) for k in (5, 20, 50)}
    cases |= {f"5 moves of {s} chains, batch 100": (s, 5, 100) for s in (2, 40)}
    cases |= {f"5 moves of 10 chains, batch {b}": (10, 5, b) for b in (10, 30)}
    command = [sys.executable, __file__, "--one-likelihood"]
    return {
        name: json.loads(subprocess.run([*command, *map(str, case)], capture_output=True, check=True).stdout)
        for name, case in cases.items()
    }


def one_likelihood(samples: str, k: str, batch: str) -> None:
    """Run by `likelihoods` in a process of its own."""
    problem = Problem(int(batch))
    likelihood(problem, 1, 1)
    before = resident()
    seconds = timed({"likelihood": lambda: likelihood(problem, int(samples), int(k))}, 2)["likelihood"]
    print(json.dumps({"images_per_second": int(batch) / statistics.median(seconds), "MB": peak() - before}))


def scaling(rounds: int) -> dict:
    """Seconds per step against K, samples and batch size."""
    cases = {f"L-MCVAE, K={k}, batch 100": ("l-mcvae", k, 1, 100) for k in (1, 2, 5, 10, 20)}
    cases |= {f"A-MCVAE, K=3, {s} samples, batch 100": ("a-mcvae", 3, s, 100) for s in (2, 5, 10)}
    cases |= {f"L-MCVAE, K=5, batch {b}": ("l-mcvae", 5, 1, b) for b in (10, 30, 300)}
    problems = {batch: Problem(batch) for batch in {settings[3] for settings in cases.values()}}

    def step(name: str, k: int, samples: int, batch: int):
        loss = by_package(objective(name, k, samples))
        return lambda: problems[batch].gradients(problems[batch].ours, loss)

    seconds = timed({name: step(*settings) for name, settings in cases.items()}, max(rounds // 3, 3))
    return {name: statistics.median(times) for name, times in seconds.items()}


def memory() -> dict:
    """Peak memory of one training step above that of the process before it, in MB, each in a process of its own."""
    cases = {f"K={k}, normal": ("normal", "l-mcvae", k, 1, 100) for k in (5, 20, 50)}
    cases |= {f"K={k}, low": ("low", "l-mcvae", k, 1, 100) for k in (5, 20, 50, 200)}
    cases |= {f"A-MCVAE, K=3, {s} samples, normal": ("normal", "a-mcvae", 3, s, 100) for s in (2, 5, 10)}
    cases |= {f"K=5, batch {b}, normal": ("normal", "l-mcvae", 5, 1, b) for b in (10, 30, 300)}
    command = [sys.executable, __file__, "--one-step"]
    return {
        name: json.loads(subprocess.run([*command, *map(str, case)], capture_output=True, check=True).stdout)
        for name, case in cases.items()
    }


def one_step(kind: str, name: str, k: str, samples: str, batch: str) -> None:
    """Run by `memory` in a process of its own."""
    problem, loss = Problem(int(batch)), by_package(objective(name, int(k), int(samples)))
    problem.gradients(problem.ours, by_package(objective("vae")))
    before = resident()
    start = time.perf_counter()
    problem.gradients(problem.ours, loss, memory=kind)
    print(json.dumps({"MB": peak() - before, "seconds": time.perf_counter() - start}))


def alone(rounds: int) -> dict:
    """Seconds of cases that have a process to themselves, with freed memory kept and with it left to glibc.

    Among others, glibc has learned thresholds from their large blocks that it does not learn from a case alone.
    """
    command = [sys.executable, __file__, "--one-case"]
    cases = ("VAE step", "L-MCVAE step, K=5", "AIS-HMC of 100 images", "AIS-HMC of 100 images, reference")
    seconds: dict[str, dict[str, list[float]]] = {name: {"kept": [], "left": []} for name in cases}
    for _ in range(max(rounds // 2, 3)):
        for name, policies in seconds.items():
            for policy, times in policies.items():
                run = subprocess.run([*command, name, policy], capture_output=True, check=True)
                times.append(json.loads(run.stdout))
    return {
        name: {policy: statistics.median(times) for policy, times in policies.items()}
        for name, policies in seconds.items()
    }


def one_case(name: str, policy: str) -> None:
    """Run by `alone` in a process of its own."""
    if policy == "kept":
        mcvae.keep_memory()
    problem = Problem(100)
    cases = {
        "VAE step": lambda: problem.gradients(problem.ours, by_package(objective("vae"))),
        "L-MCVAE step, K=5": lambda: problem.gradients(problem.ours, by_package(objective("l-mcvae", 5))),
        "AIS-HMC of 100 images": lambda: likelihood(problem),
        "AIS-HMC of 100 images, reference": lambda: reference_likelihood(problem),
    }
    rounds = 3 if "AIS" in name else 20
    print(json.dumps(statistics.median(timed({name: cases[name]}, rounds)[name])))


def resident() -> float:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 1e6


def peak() -> float:
    match = re.search(r"VmHWM:\s+(\d+) kB", Path("/proc/self/status").read_text())
    return int(match[1]) * 1024 / 1e6


def overhead(rounds: int, steps: int = 60) -> dict:
    """Share of a training step outside model and optimiser: batches, logging, Lightning."""
    from mcvae.data import TRANSFORMS, Batches, Images
    from mcvae.runs.config import TrainConfig
    from mcvae.training.callbacks import Checkpoints, Metrics
    from mcvae.training.module import VariationalTraining
    from mcvae.training.run import BatchedImages, build_trainer

    torch.manual_seed(0)
    pixels = (torch.rand(steps * 100, 1, 28, 28) * 255).byte()
    images = Images("noise", pixels, pixels[:0], pixels[:0])
    shares = {}
    for name, k, samples in (("vae", 0, 1), ("l-mcvae", 5, 1)):
        inside, outside = [], []
        for _ in range(max(rounds // 2, 3)):
            config = TrainConfig()
            config.data.transform, config.run.epochs = "binarize", 1
            model, estimator = build_model((1, 28, 28), LATENT), objective(name, k, samples)
            module = VariationalTraining(model, estimator, config.optimizer)
            with tempfile.TemporaryDirectory() as folder:
                metrics = Metrics(Path(folder), 0)
                trainer = build_trainer(config, Path(folder), [metrics, Checkpoints(Path(folder))])
                trainer.fit(module, BatchedImages(images, config))
            outside.append(metrics.seconds)
            optimiser = torch.optim.Adam(model.parameters())
            batches = list(Batches(pixels, 100, TRANSFORMS["binarize"], seed=0, epoch=0))
            start = time.perf_counter()
            for x in batches:
                estimate = estimator(model.bridge(x))
                optimiser.zero_grad()
                estimate.loss.mean().backward()
                torch.nn.utils.clip_grad_norm_(model.parameters(), 100.0)
                optimiser.step()
                estimator.adapt(estimate)
                del estimate  # or its graph would live into the next step
            inside.append(time.perf_counter() - start)
        shares[name] = statistics.median(1 - a / b for a, b in zip(inside, outside, strict=True))
    return shares


def first_step() -> dict:
    """Seconds from the start of Python."""
    script = (
        "import torch, mcvae; from mcvae.models import build_model; m = build_model((1, 28, 28), 64); "
        "mcvae.recipes.l_mcvae(5, 64)(m.bridge(torch.zeros(100, 1, 28, 28))).loss.mean().backward()"
    )
    commands = {
        "import torch": [sys.executable, "-c", "import torch"],
        "import mcvae": [sys.executable, "-c", "import mcvae"],
        "mcvae --help": [sys.executable, "-m", "mcvae.cli", "--help"],
        "first L-MCVAE step": [sys.executable, "-c", script],
    }
    seconds = timed({n: lambda c=c: subprocess.run(c, capture_output=True, check=True) for n, c in commands.items()}, 3)
    return {name: statistics.median(times) for name, times in seconds.items()}


def markdown(results: dict) -> str:
    """The tables of docs/performance.md."""
    steps, evaluated, held = results["training_step"], results["evaluation"], results["memory"]
    machine = results["machine"]
    lines = [
        f"`{results['command']}`: torch {machine['torch']}, {machine['threads']} CPU threads, batch "
        f"{machine['batch']}, MNIST's network (28 × 28, {LATENT} latents), medians of {machine['rounds']} interleaved "
        "rounds.",
        "",
        "| ratio | measured | at least | aim |",
        "|---|---|---|---|",
    ]
    over = steps["reference_over_ours"]
    chains = "AIS-HMC of 100 images"
    processes = results["alone"][f"{chains}, reference"]["left"] / results["alone"][chains]["kept"]
    low = held["K=50, low"]["MB"] / held["K=5, normal"]["MB"]
    lines += [
        f"| L-MCVAE K=5: reference / ours | {over['L-MCVAE, K=5']:.1f} | 3 | 5 |",
        f"| A-MCVAE K=5, 5 samples: reference / ours | {over['A-MCVAE, K=5, 5 samples']:.1f} | 5 | 8 |",
        f"| L-MCVAE K=5 / plain VAE step | {steps['l_mcvae_over_reference_vae']:.1f} | 5 | 3.5 |",
        f"| L-MCVAE K=5 / our own, faster VAE step | {steps['times_a_vae_step']['L-MCVAE, K=5']:.1f} | | |",
        f"| AIS-HMC, same chains and moves: reference / ours, each in its own process | {processes:.1f} | 3 | 5 |",
        f"| AIS-HMC, in one process, freed memory kept for both | {evaluated['reference_over_ours']:.1f} | | |",
        f"| peak memory, K=50 `low` / K=5 `normal` | {low:.2f} | 1.5 | 1 |",
        f"| training outside model and optimiser, VAE | {100 * results['overhead']['vae']:.0f} % | 8 % | 3 % |",
        f"| training outside model and optimiser, L-MCVAE | {100 * results['overhead']['l-mcvae']:.0f} % | 8 % | 3 % |",
        "",
        "| training step | ms | decoder passes | times a VAE step |",
        "|---|---|---|---|",
    ]
    for name, seconds in steps["seconds"].items():
        passes, times = steps["decoder_passes"][name], steps["times_a_vae_step"][name]
        lines.append(f"| {name} | {1000 * seconds:.0f} | {passes} | {times:.1f} |")
    lines += [
        "",
        "| gradient in float32, relative to the reference's | ours | reference, other layout |",
        "|---|---|---|",
    ]
    lines += [
        f"| {name} | " + " | ".join(f"{d:.0e}" for d in row.values()) + " |" for name, row in steps["rounding"].items()
    ]
    lines += ["", "| likelihood, 10 chains × 5 moves × 3 leapfrogs | images / s |", "|---|---|"]
    lines += [f"| {name} | {value:.1f} |" for name, value in evaluated["images_per_second"].items()]
    lines += ["", "| AIS-HMC, moves of 3 leapfrogs | images / s | MB |", "|---|---|---|"]
    for name, case in results["likelihoods"].items():
        lines.append(f"| {name} | {case['images_per_second']:.1f} | {case['MB']:.0f} |")
    lines += ["", "| cost grows with | ms |", "|---|---|"]
    lines += [f"| {name} | {1000 * seconds:.0f} |" for name, seconds in results["scaling"].items()]
    lines += ["", "| alone in a process; freed memory | kept, ms | left to glibc, ms | ratio |", "|---|---|---|---|"]
    for name, seconds in results["alone"].items():
        kept, left = 1000 * seconds["kept"], 1000 * seconds["left"]
        lines.append(f"| {name} | {kept:.0f} | {left:.0f} | {left / kept:.2f} |")
    lines += ["", "| memory of a step (L-MCVAE, batch 100, if not said otherwise) | MB | ms |", "|---|---|---|"]
    lines += [f"| {name} | {case['MB']:.0f} | {1000 * case['seconds']:.0f} |" for name, case in held.items()]
    lines += ["", "| from the start of Python | s |", "|---|---|"]
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in results["first_step"].items()]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--batch", type=int, default=100)
    parser.add_argument("--write", type=Path, help="page whose tables to replace; JSON goes beside it")
    parser.add_argument("--one-step", nargs=5, help=argparse.SUPPRESS)
    parser.add_argument("--one-likelihood", nargs=3, help=argparse.SUPPRESS)
    parser.add_argument("--one-case", nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--only", nargs="+", help="measure these parts again, and keep the rest of what --write finds")
    options = parser.parse_args()
    if options.one_step:
        one_step(*options.one_step)
        return
    if options.one_likelihood:
        one_likelihood(*options.one_likelihood)
        return
    if options.one_case:
        one_case(*options.one_case)
        return
    mcvae.keep_memory()  # for the reference, too
    results = {
        "command": "make bench",
        "machine": {
            "torch": torch.__version__,
            "python": platform.python_version(),
            "threads": torch.get_num_threads(),
            "rounds": options.rounds,
            "batch": options.batch,
        },
    }
    parts = {
        "training_step": lambda: training_steps(options.rounds, options.batch),
        "evaluation": lambda: evaluation(options.rounds, options.batch),
        "likelihoods": likelihoods,
        "scaling": lambda: scaling(options.rounds),
        "alone": lambda: alone(options.rounds),
        "memory": memory,
        "overhead": lambda: overhead(options.rounds),
        "first_step": first_step,
    }
    if options.only:
        results = json.loads(options.write.with_suffix(".json").read_text())
        parts = {name: parts[name] for name in options.only}
    for name, part in parts.items():
        print(f"measuring {name} ...", file=sys.stderr)
        results[name] = part()
    tables = markdown(results)
    print(tables)
    if options.write:
        options.write.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
        before, _, rest = options.write.read_text().partition("<!-- measured -->")
        _, _, after = rest.partition("<!-- end -->")
        options.write.write_text(f"{before}<!-- measured -->\n\n{tables}\n\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
