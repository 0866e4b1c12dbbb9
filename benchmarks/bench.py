"""What a training step and a likelihood cost, against the algorithms as the paper writes them.

Rounds are interleaved in one process and ratios are paired by round, because machines are noisy. Before anything is
timed, package and reference must give the same weights and gradients from the same noise. At the end, the numbers are
compared with those of the page that is written.

    python benchmarks/bench.py [--rounds 7] [--only decoders threads] [--write docs/performance.md]
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
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import reference
import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import mcvae
from mcvae.allocator import return_memory
from mcvae.models import LatentVariableModel, build_model, optimized
from mcvae.models.likelihoods.bernoulli import BernoulliLikelihood
from mcvae.models.networks import Decoder, GaussianEncoder, UpsampledConv2d
from mcvae.training.threads import threads_for

LATENT, LEAPFROG = 64, 3
STEP, STEP_HMC = 2.0**-7, 2.0**-4  # exact in float32 and float64
PIXELS = 28 * 28


class Counted(nn.Module):
    """A decoder that counts the rows it sees."""

    def __init__(self, decoder: nn.Module):
        super().__init__()
        self.decoder, self.calls = decoder, 0

    def forward(self, z: torch.Tensor):
        self.calls += 1
        return self.decoder(z)


def users_encoder() -> nn.Module:
    """The paper's eight convolutions as a user writes them: torch's layers and memory layout."""
    layers: list[nn.Module] = []
    for fan_in, width in ((1, 16), (16, 32), (32, 64), (64, 64)):
        layers += [nn.AvgPool2d(2, ceil_mode=True)] if layers else []
        layers += [nn.Conv2d(fan_in, width, 3, padding=1), nn.LeakyReLU(0.1)]
        layers += [nn.Conv2d(width, width, 3, padding=1), nn.LeakyReLU(0.1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(64 * 4 * 4, 2 * LATENT))


def users_convolutions() -> nn.Module:
    """A decoder of the paper's kind as a user writes it: `nn.Upsample`, convolutions, GELU."""
    layers = [nn.Linear(LATENT, 64 * 7 * 7), nn.GELU(), nn.Unflatten(1, (64, 7, 7)), nn.Conv2d(64, 32, 3, padding=1)]
    for fan_in, width in ((32, 16), (16, 8)):
        layers += [nn.GELU(), nn.Upsample(scale_factor=2), nn.Conv2d(fan_in, width, 3, padding=1)]
        layers += [nn.GELU(), nn.Conv2d(width, 16, 3, padding=1)]
    return nn.Sequential(*layers, nn.GELU(), nn.Conv2d(16, 1, 3, padding=1))


class AttentionDecoder(nn.Module):
    """Two layers of a transformer over 49 patches."""

    def __init__(self, width: int = 32):
        super().__init__()
        self.patches = nn.Linear(LATENT, 49 * width)
        layer = nn.TransformerEncoderLayer(width, 4, 64, dropout=0.0, activation="gelu", batch_first=True)
        self.layers, self.pixels = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(width, 16)

    def forward(self, z: torch.Tensor):
        patches = self.pixels(self.layers(self.patches(z).unflatten(1, (49, -1))))
        return patches.reshape(-1, 7, 7, 4, 4).transpose(2, 3).reshape(-1, 1, 28, 28)


def mlp_decoder() -> nn.Module:
    """Two hidden layers with Tanh."""
    layers = [nn.Linear(LATENT, 400), nn.Tanh(), nn.Linear(400, 400), nn.Tanh(), nn.Linear(400, PIXELS)]
    return nn.Sequential(*layers, nn.Unflatten(1, (1, 28, 28)))


DECODERS = {"convolutions": users_convolutions, "attention": AttentionDecoder, "MLP": mlp_decoder}


class Problem:
    """A network for MNIST's shape of data, twice: as the package runs it, and as one would write it down.

    Of our own network, the plain one upsamples first and convolves then, in torch's default memory layout. A user's is
    plain as it is, and `fast` after `optimized`. Both compute the same.
    """

    def __init__(self, batch: int, network: str = "ours", latent_dim: int = LATENT):
        torch.manual_seed(0)
        self.x = (torch.rand(batch, 1, 28, 28) < 0.3).float()
        if network == "ours":
            self.fast = build_model((1, 28, 28), latent_dim)
            self.plain = written_down(self.fast)
        else:
            encoder, decoder = users_encoder(), DECODERS[network]()
            self.plain = LatentVariableModel(GaussianEncoder(encoder), Decoder(decoder, BernoulliLikelihood()))
            fast = GaussianEncoder(optimized(encoder)), Decoder(optimized(decoder), BernoulliLikelihood())
            self.fast = LatentVariableModel(*fast)

    def double(self) -> "Problem":
        """Everything in float64, where rounding cannot hide a difference."""
        return self._to(torch.float64)

    def float(self) -> "Problem":
        return self._to(torch.float32)

    def _to(self, dtype: torch.dtype) -> "Problem":
        torch.set_default_dtype(dtype)
        self.x, self.fast, self.plain = self.x.to(dtype), self.fast.to(dtype), self.plain.to(dtype)
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


def objective(name: str, k: int = 0, samples: int = 1, latent_dim: int = LATENT) -> mcvae.AnnealedEstimator:
    steps = mcvae.FixedStepSizes(k, STEP)
    return {
        "vae": lambda: mcvae.recipes.vae(samples),
        "iwae": lambda: mcvae.recipes.iwae(samples),
        "l-mcvae": lambda: mcvae.recipes.l_mcvae(k, latent_dim, interior=True, step_sizes=steps, num_samples=samples),
        "a-mcvae": lambda: mcvae.recipes.a_mcvae(k, latent_dim, step_sizes=steps, num_samples=samples),
        "a-mcvae, five chains": lambda: mcvae.recipes.a_mcvae(
            k, latent_dim, step_sizes=steps, num_samples=5, control_variate=mcvae.leave_one_out
        ),
        "cmcd": lambda: mcvae.recipes.cmcd(k, latent_dim, step_sizes=steps, num_samples=samples),
        "uha": lambda: mcvae.recipes.uha(k, latent_dim, step_sizes=steps, num_samples=samples),
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
        check=False,
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


def distance(ours, theirs) -> float:
    """Relative difference of whole gradients."""
    difference = torch.cat([(a - b).flatten() for a, b in zip(ours, theirs, strict=True)])
    return float(difference.norm() / torch.cat([b.flatten() for b in theirs]).norm())


def check(name: str, difference: float) -> None:
    print(f"{name}: differs from the reference by {difference:.1e} (relative, float64)", file=sys.stderr)
    if not difference < 1e-10:
        raise SystemExit("the two do not compute the same; timings would mean nothing")


METHODS = {
    "VAE": ("vae",),
    "IWAE, 10 samples": ("iwae", 0, 10),
    "L-MCVAE, K=5": ("l-mcvae", 5),
    "L-MCVAE, K=10": ("l-mcvae", 10),
    "A-MCVAE, K=3": ("a-mcvae", 3),
    "A-MCVAE, K=5": ("a-mcvae", 5),
    "CMCD, K=3": ("cmcd", 3),
    "UHA, K=5": ("uha", 5),
}
REFERENCES = {
    "VAE, reference": ("VAE", by_package(objective("vae"))),
    "L-MCVAE, K=5, reference": ("L-MCVAE, K=5", by_reference(5, 1, adjusted=False)),
    "A-MCVAE, K=5, five chains, reference": ("A-MCVAE, K=5", by_reference(5, 5, adjusted=True)),
}
"""The row that each is compared with, and the loss."""


def training_steps(rounds: int, batch: int, network: str) -> dict:
    """Seconds per training step (bound and gradient) of every recipe, and of the reference."""
    rounding, small = {}, Problem(20, network)  # the reference holds gigabytes
    for name, k, chains in (("l-mcvae", 5, 1), ("a-mcvae, five chains", 5, 5)):
        theirs = by_reference(k, chains, adjusted=chains > 1)
        small.double()
        ours = small.gradients(small.fast, by_package(objective(name, k)))  # temperatures in float64, too
        check(f"{name} on {network}", distance(ours, small.gradients(small.plain, theirs)))
        small.float()
        of_layout = small.gradients(small.fast, theirs)
        rounding[name] = {
            "ours": distance(small.gradients(small.fast, by_package(objective(name, k))), of_layout),
            "reference, other layout": distance(small.gradients(small.plain, theirs), of_layout),
        }
    problem = Problem(batch, network)
    losses = {name: by_package(objective(*settings)) for name, settings in METHODS.items()}
    runs = {name: (problem.fast, loss) for name, loss in losses.items()}
    if network == "ours":
        runs["VAE with RealNVP"] = build_model((1, 28, 28), LATENT, flow="realnvp"), losses["VAE"]
    runs |= {name: (problem.plain, loss) for name, (_, loss) in REFERENCES.items()}
    passes = {}
    for name, (model, loss) in runs.items():
        counted = LatentVariableModel(model.encoder, Counted(model.decoder))
        loss(counted.bridge(problem.x))
        passes[name] = counted.decoder.calls
    cases = {
        name: lambda model=model, loss=loss: problem.gradients(model, loss) for name, (model, loss) in runs.items()
    }
    seconds = timed(cases, rounds)
    return {
        "seconds": {name: statistics.median(times) for name, times in seconds.items()},
        "decoder_passes": passes,
        "times_a_vae_step": {name: ratio(seconds, name, "VAE") for name in seconds},
        "reference_over_ours": {ours: ratio(seconds, name, ours) for name, (ours, _) in REFERENCES.items()},
        "rounding": rounding,
    }


def limits(rounds: int, batch: int) -> dict:
    """What L-MCVAE with K=5 must cost in VAE steps, by counting passes through encoder and decoder.

    Six states take six passes of the decoder each (forward, score, tangent, adjoint, and two products for the weights),
    a VAE step three; both take three of the encoder.
    """
    found = {}
    for network in ("ours", "convolutions"):
        problem = Problem(batch, network)
        cases = {
            "VAE": lambda p=problem: p.gradients(p.fast, by_package(objective("vae"))),
            "encoder": lambda p=problem: torch.autograd.grad(
                p.fast.encoder(p.x).base_dist.loc.sum(), list(p.fast.encoder.parameters())
            ),
        }
        seconds = timed(cases, 3 * rounds)
        share = ratio(seconds, "encoder", "VAE")
        found[network] = share + 36 * (1 - share) / 3
    return found


def decoders(rounds: int, batch: int) -> dict:
    """Chains through decoders without convolutions, whose training steps `training_steps` does not measure."""
    found = {}
    for network in ("attention", "MLP"):
        problem = Problem(batch, network)
        runs = {"VAE": (problem.fast, objective("vae")), "L-MCVAE, K=5": (problem.fast, objective("l-mcvae", 5))}
        cases = {n: lambda m=m, o=o, p=problem: p.gradients(m, by_package(o)) for n, (m, o) in runs.items()}
        cases["reference"] = lambda p=problem: p.gradients(p.plain, by_reference(5, 1, adjusted=False))
        with sdpa_kernel(SDPBackend.MATH):  # or the reference could not differentiate attention twice
            seconds = timed(cases, rounds)
        found[network] = {
            "seconds": statistics.median(seconds["L-MCVAE, K=5"]),
            "times_a_vae_step": ratio(seconds, "L-MCVAE, K=5", "VAE"),
            "reference_over_ours": ratio(seconds, "reference", "L-MCVAE, K=5"),
        }
    return found


def likelihood(problem: Problem, samples: int = 10, k: int = 5) -> torch.Tensor:
    """AIS-HMC by the paper's short protocol: 10 chains of 5 moves of 3 leapfrogs."""
    with torch.no_grad():
        return ais_by_package(problem.fast.bridge(problem.x), samples, k)


def reference_likelihood(problem: Problem, samples: int = 10, k: int = 5) -> torch.Tensor:
    with torch.no_grad():
        return reference.ais_hmc(problem.plain.bridge(problem.x), samples, k, STEP_HMC, LEAPFROG, source())


def passes_of_decoder(problem: Problem, rows: int, portion: int = 500) -> None:
    """Forward and backward passes of the decoder alone, for as many rows: what AIS-HMC cannot do without."""
    z = torch.randn(portion, LATENT, requires_grad=True)
    x = problem.x.repeat(-(-portion // len(problem.x)), 1, 1, 1)[:portion]
    for parameter in problem.fast.parameters():
        parameter.requires_grad_(False)
    for _ in range(rows // portion):
        torch.autograd.grad(problem.fast.decoder(z).log_prob(x).sum(), z)
    for parameter in problem.fast.parameters():
        parameter.requires_grad_(True)


def evaluation(rounds: int, batch: int, network: str) -> dict:
    """AIS-HMC likelihoods, both with freed memory kept, and the decoder's passes alone."""
    problem = Problem(batch, network).double()
    check(f"AIS-HMC on {network}", distance([likelihood(problem)], [reference_likelihood(problem)]))
    problem.float()
    rows = batch * 10 * (5 * LEAPFROG + 1)
    cases = {
        "ours": lambda: likelihood(problem),
        "reference": lambda: reference_likelihood(problem),
        "passes": lambda: passes_of_decoder(problem, rows),
    }
    seconds = timed(cases, rounds)
    return {
        "images_per_second": {name: batch / statistics.median(seconds[name]) for name in ("ours", "reference")},
        "reference_over_ours": ratio(seconds, "reference", "ours"),
        "ours_over_passes": ratio(seconds, "ours", "passes"),
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
    """Seconds per step against K, samples, batch size and latents."""
    cases = {f"L-MCVAE, K={k}, batch 100": ("l-mcvae", k, 1, 100) for k in (1, 2, 5, 10, 20)}
    cases |= {f"L-MCVAE, K={k}, batch 10": ("l-mcvae", k, 1, 10) for k in (5, 50, 100, 200)}
    cases |= {f"A-MCVAE, K=3, {s} samples, batch 100": ("a-mcvae", 3, s, 100) for s in (1, 2, 5, 10)}
    cases |= {f"L-MCVAE, K=5, batch {b}": ("l-mcvae", 5, 1, b) for b in (30, 300)}
    cases |= {f"L-MCVAE, K=5, batch 100, {d} latents": ("l-mcvae", 5, 1, 100, d) for d in (16, 128, 512)}
    problems: dict[tuple[int, int], Problem] = {}

    def step(name: str, k: int, samples: int, batch: int, latent_dim: int = LATENT):
        loss = by_package(objective(name, k, samples, latent_dim))
        problem = problems.setdefault((batch, latent_dim), Problem(batch, latent_dim=latent_dim))
        return lambda: problem.gradients(problem.fast, loss)

    seconds = timed({name: step(*settings) for name, settings in cases.items()}, max(rounds // 3, 3))
    return {name: statistics.median(times) for name, times in seconds.items()}


def threads(rounds: int) -> dict:
    """Seconds of a VAE step alone and beside a process that keeps one core: one thread, two, or as training chooses."""
    command = [sys.executable, __file__, "--one-case", "VAE step", "kept"]
    found: dict[str, dict[str, list[float]]] = {}
    for _ in range(max(rounds // 2, 3)):
        for others in ("quiet", "busy"):
            with busy_core() if others == "busy" else nullcontext():
                for number in ("1", "2", "as chosen"):
                    environment = os.environ | {"OMP_NUM_THREADS": number, "OMP_WAIT_POLICY": "PASSIVE"}
                    if number == "as chosen":
                        del environment["OMP_NUM_THREADS"]
                    run = subprocess.run(command, capture_output=True, check=True, env=environment)
                    found.setdefault(number, {}).setdefault(others, []).append(json.loads(run.stdout))
    return {number: {k: statistics.median(times) for k, times in row.items()} for number, row in found.items()}


@contextmanager
def busy_core() -> Iterator[None]:
    """A second process that computes without end."""
    process = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        yield
    finally:
        process.kill()
        process.wait()


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
    if kind == "low":
        return_memory()
    problem, loss = Problem(int(batch)), by_package(objective(name, int(k), int(samples)))
    problem.gradients(problem.fast, by_package(objective("vae")))
    before = resident()
    start = time.perf_counter()
    problem.gradients(problem.fast, loss, memory=kind)
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
        "VAE step": lambda: problem.gradients(problem.fast, by_package(objective("vae"))),
        "L-MCVAE step, K=5": lambda: problem.gradients(problem.fast, by_package(objective("l-mcvae", 5))),
        "AIS-HMC of 100 images": lambda: likelihood(problem),
        "AIS-HMC of 100 images, reference": lambda: reference_likelihood(problem),
    }
    rounds = 3 if "AIS" in name else 20
    with threads_for():  # which obeys OMP_NUM_THREADS
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


def headlines(results: dict) -> dict[str, tuple[float, str, str]]:
    """Ratios that matter: measured, at least, aim."""
    ours, users = results["training_step"], results["training_step_user"]
    chains = "AIS-HMC of 100 images"
    processes = results["alone"][f"{chains}, reference"]["left"] / results["alone"][chains]["kept"]
    low = results["memory"]["K=50, low"]["MB"] / results["memory"]["K=5, normal"]["MB"]
    both, chosen = results["threads"]["2"], results["threads"]["as chosen"]
    return {
        "L-MCVAE K=5 / VAE": (ours["times_a_vae_step"]["L-MCVAE, K=5"], "", ""),
        "L-MCVAE K=5 / VAE, user's network": (users["times_a_vae_step"]["L-MCVAE, K=5"], "5", "4.5"),
        "L-MCVAE K=5 / VAE, counting passes": (results["limits"]["ours"], "", ""),
        "L-MCVAE K=5 / VAE, counting passes, user's network": (results["limits"]["convolutions"], "", ""),
        "L-MCVAE K=5: reference / ours": (ours["reference_over_ours"]["L-MCVAE, K=5"], "3", "5"),
        "L-MCVAE K=5: reference / ours, user's network": (
            users["reference_over_ours"]["L-MCVAE, K=5"],
            "3",
            "4",
        ),
        "A-MCVAE K=5: reference (five chains) / ours (one)": (ours["reference_over_ours"]["A-MCVAE, K=5"], "20", "28"),
        "A-MCVAE K=5: reference (five chains) / ours (one), user's network": (
            users["reference_over_ours"]["A-MCVAE, K=5"],
            "12",
            "20",
        ),
        "AIS-HMC: reference / ours, one process": (results["evaluation"]["reference_over_ours"], "", ""),
        "AIS-HMC: reference / ours, one process, user's network": (
            results["evaluation_user"]["reference_over_ours"],
            "2.5",
            "3.5",
        ),
        "AIS-HMC: reference / ours, each in its own process": (processes, "3", "5"),
        "AIS-HMC / passes of the decoder alone": (results["evaluation"]["ours_over_passes"], "1.2", ""),
        "AIS-HMC / passes of the decoder alone, user's network": (
            results["evaluation_user"]["ours_over_passes"],
            "1.2",
            "",
        ),
        "busy machine / quiet machine, VAE step": (chosen["busy"] / chosen["quiet"], "2.2", "1.6"),
        "busy machine / quiet machine, VAE step, always two threads": (both["busy"] / both["quiet"], "", ""),
        "peak memory, K=50 `low` / K=5 `normal`": (low, "1.5", "1"),
        "share of training outside model and optimiser, VAE": (results["overhead"]["vae"], "0.08", "0.03"),
        "share of training outside model and optimiser, L-MCVAE": (results["overhead"]["l-mcvae"], "0.08", "0.03"),
    }


def slower(results: dict, before: dict) -> list[str]:
    """What takes a sixth longer than it did, in units of a VAE step or of the reference, or a sixth more memory."""
    old, found = _flat(before), []
    for name, value in _flat(results).items():
        costs = "times_a_vae_step" in name or "ours_over" in name or name.endswith("MB")
        if name in old and costs and value > 7 / 6 * old[name]:
            found.append(f"{name}: {old[name]:.2f} -> {value:.2f}")
        if name in old and "reference_over_ours" in name and value < 6 / 7 * old[name]:
            found.append(f"{name}: {old[name]:.2f} -> {value:.2f}")
    return found


def _flat(content: Any, name: str = "") -> dict[str, float]:
    """The numbers in nested dictionaries, by their names with dots."""
    if isinstance(content, dict):
        return {key: value for part in content for key, value in _flat(content[part], f"{name}.{part}").items()}
    return {name.removeprefix("."): content} if isinstance(content, float) else {}


def markdown(results: dict) -> str:
    """The tables of docs/performance.md."""
    machine = results["machine"]
    lines = [
        f"`{results['command']}`: torch {machine['torch']}, {machine['threads']} CPU threads, batch "
        f"{machine['batch']}, images of MNIST's shape, {LATENT} latents, medians of {machine['rounds']} interleaved "
        "rounds.",
    ]
    lines += _table("ratio | measured | at least | aim")
    for name, (value, least, aim) in headlines(results).items():
        lines.append(f"| {name} | {value:.2f} | {least} | {aim} |")
    lines += _table("training step | ms | decoder passes | times a VAE step | user's network, ms | times a VAE step")
    ours, users = results["training_step"], results["training_step_user"]
    for name, seconds in ours["seconds"].items():
        cells = [f"{1000 * seconds:.0f}", ours["decoder_passes"][name], f"{ours['times_a_vae_step'][name]:.1f}", "", ""]
        if name in users["seconds"]:
            cells[3:] = f"{1000 * users['seconds'][name]:.0f}", f"{users['times_a_vae_step'][name]:.1f}"
        lines.append(f"| {name} | " + " | ".join(map(str, cells)) + " |")
    lines += _table("decoder | L-MCVAE K=5, ms | times a VAE step | reference / ours")
    for name, row in results["decoders"].items():
        lines.append(
            f"| {name} | {1000 * row['seconds']:.0f} | {row['times_a_vae_step']:.1f} | "
            f"{row['reference_over_ours']:.1f} |"
        )
    lines += _table("gradient in float32, relative to the reference's | ours | reference, other layout")
    lines += [
        f"| {name} | " + " | ".join(f"{d:.0e}" for d in row.values()) + " |" for name, row in ours["rounding"].items()
    ]
    lines += _table("likelihood, 10 chains × 5 moves × 3 leapfrogs | our network, images / s | user's, images / s")
    for name in ("ours", "reference"):
        speeds = [results[part]["images_per_second"][name] for part in ("evaluation", "evaluation_user")]
        lines.append(f"| {name} | " + " | ".join(f"{speed:.1f}" for speed in speeds) + " |")
    lines += _table("AIS-HMC, moves of 3 leapfrogs | images / s | MB")
    for name, case in results["likelihoods"].items():
        lines.append(f"| {name} | {case['images_per_second']:.1f} | {case['MB']:.0f} |")
    lines += _table("VAE step | quiet machine, ms | one core busy, ms | ratio")
    for name, row in results["threads"].items():
        quiet, busy = 1000 * row["quiet"], 1000 * row["busy"]
        lines.append(f"| {name} thread{'s' * (name != '1')} | {quiet:.0f} | {busy:.0f} | {busy / quiet:.1f} |")
    lines += _table("cost grows with | ms")
    lines += [f"| {name} | {1000 * seconds:.0f} |" for name, seconds in results["scaling"].items()]
    lines += _table("alone in a process; freed memory | kept, ms | left to glibc, ms | ratio")
    for name, seconds in results["alone"].items():
        kept, left = 1000 * seconds["kept"], 1000 * seconds["left"]
        lines.append(f"| {name} | {kept:.0f} | {left:.0f} | {left / kept:.2f} |")
    lines += _table("memory of a step (L-MCVAE, batch 100, if not said otherwise) | MB | ms")
    held = results["memory"]
    lines += [f"| {name} | {case['MB']:.0f} | {1000 * case['seconds']:.0f} |" for name, case in held.items()]
    lines += _table("from the start of Python | s")
    lines += [f"| {name} | {seconds:.2f} |" for name, seconds in results["first_step"].items()]
    return "\n".join(lines)


def _table(header: str) -> list[str]:
    return ["", f"| {header} |", "|---" * (header.count(" | ") + 1) + "|"]


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
        "training_step": lambda: training_steps(options.rounds, options.batch, "ours"),
        "training_step_user": lambda: training_steps(options.rounds, options.batch, "convolutions"),
        "limits": lambda: limits(options.rounds, options.batch),
        "decoders": lambda: decoders(options.rounds, options.batch),
        "evaluation": lambda: evaluation(options.rounds, options.batch, "ours"),
        "evaluation_user": lambda: evaluation(options.rounds, options.batch, "convolutions"),
        "threads": lambda: threads(options.rounds),
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
    last = json.loads(options.write.with_suffix(".json").read_text()) if options.write else {}
    for name, part in parts.items():
        print(f"measuring {name} ...", file=sys.stderr)
        results[name] = part()
        if options.write:
            options.write.with_suffix(".json").write_text(json.dumps(results, indent=2) + "\n")
    tables = markdown(results)
    print(tables)
    if options.write:
        found = slower(results, last) or ["nothing"]
        print("\n".join(["slower, or larger, than the page says:", *found]), file=sys.stderr)
        before, _, rest = options.write.read_text().partition("<!-- measured -->")
        _, _, after = rest.partition("<!-- end -->")
        options.write.write_text(f"{before}<!-- measured -->\n\n{tables}\n\n<!-- end -->{after}")


if __name__ == "__main__":
    main()
