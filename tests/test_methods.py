"""One registry of methods: keys are read back, built, priced and shown; a new method is one entry."""

import subprocess
import sys
from importlib import import_module
from itertools import product
from pathlib import Path

import pytest

import mcvae
from mcvae.experiments.image_tables import PAPER_METHODS
from mcvae.experiments.paper import POSTERIOR_METHODS
from mcvae.runs.config import TrainConfig, check, default_folder, parse_config
from mcvae.runs.likelihood import LIKELIHOODS
from mcvae.runs.method import METHODS, Choice, Method, MethodConfig, key_of, label_of, method_named, parse_key, settled
from mcvae.runs.plain import read_rows

ROOT = Path(__file__).parent.parent
TRAINED = [name for name, method in METHODS.items() if method.builder is not None]


def variants(name):
    """Every combination of what the method's keys can say."""
    values = {piece.field: list(piece.words) if isinstance(piece, Choice) else [2, 7] for piece in METHODS[name].pieces}
    return [MethodConfig(name, **dict(zip(values, chosen, strict=True))) for chosen in product(*values.values())]


@pytest.mark.parametrize("name", TRAINED)
def test_keys_are_read_back_and_differ(name):
    configs = variants(name)
    keys = [key_of(config) for config in configs]
    assert len(set(keys)) == len(configs)
    for key, config in zip(keys, configs, strict=True):
        assert METHODS[name].whole(parse_key(key)) == METHODS[name].whole(config)
        assert settled(MethodConfig(key)) == parse_key(key)
        assert method_named(key) is METHODS[name]
        assert label_of(key).startswith(METHODS[name].title)


@pytest.mark.parametrize("name", TRAINED)
def test_what_is_built_costs_what_is_said(name):
    for config in variants(name):
        built = METHODS[name].build(config, 3, 4)
        assert METHODS[name].cost(config) == built.num_samples * built.num_evaluations
        bound = {"renyi": "renyi(0.5)"}.get(config.bound, config.bound or METHODS[name].own.get("bound", "elbo"))
        assert getattr(built.bound, "__name__", str(built.bound)) == bound


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (MethodConfig("vae", damping=0.5), "--method.damping 0.5 has no meaning for vae"),
        (MethodConfig("cmcd", control_variate="stopped"), "has no meaning for cmcd"),
        (MethodConfig("a-mcvae", backward="learned"), "has no meaning for a-mcvae"),
        (MethodConfig("l-mcvae-k5-renyi"), "--method.bound renyi of one sample is the ELBO"),
        (MethodConfig("vae", bound="iwae"), "--method.bound iwae of one sample is the ELBO"),
    ],
)
def test_a_setting_without_meaning_for_the_method_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        settled(config)


def test_methods_look_different():
    looks = {(method.colour, method.marker) for method in METHODS.values()}
    assert len(looks) == len(METHODS) == len({method.colour for method in METHODS.values()})


def test_keys_of_published_results_stay_valid():
    published = set(PAPER_METHODS)
    for path in [*(ROOT / "results").glob("*/records.csv"), ROOT / "src/mcvae/experiments/paper.csv"]:
        found = {row["method"] for row in read_rows(path)}
        if path.parent.name == "posteriors":  # samplers of single densities, with names of their own
            assert all(key.startswith(POSTERIOR_METHODS) for key in found)
        else:
            published |= found
    assert len(published) > 30
    for key in published:
        assert method_named(key).title in label_of(key)
        assert "-" not in label_of(key).removeprefix(method_named(key).title), key
    for key in PAPER_METHODS:
        whole = method_named(key).whole(parse_key(key))
        assert whole == method_named(key).whole(parse_key(key_of(whole)))


@pytest.mark.parametrize(
    ("key", "message"),
    [
        ("l-mcvea-k5", "Did you mean 'l-mcvae'"),
        ("l-mcvae-k5-x", r"keys of l-mcvae look like l-mcvae\[-linear\|sigmoid\|learned\]\[-k5\]\[-n5\]"),
        ("iwae-0", "unknown method 'iwae-0'"),
        ("mle", "unknown method 'mle'"),
        ("a-mcvae-k5-n5-cv", "unknown method"),
        ("", "unknown method ''"),
    ],
)
def test_what_is_no_key_is_refused_with_advice(key, message):
    with pytest.raises(ValueError, match=message):
        parse_key(key)


def test_a_whole_key_is_a_name_everywhere_and_contradictions_are_refused():
    config = parse_config({"method": {"name": "a-mcvae-sigmoid-k3-n2"}})
    check(config)
    assert (config.method.name, config.method.schedule, config.method.num_steps) == ("a-mcvae", "sigmoid", 3)
    assert default_folder(config) == "runs/digits-a-mcvae-sigmoid-k3-n2-s0"
    with pytest.raises(ValueError, match="--method.num_steps is 7, but the method l-mcvae-k3 says 3"):
        check(TrainConfig(method=MethodConfig("l-mcvae-k3", num_steps=7)))


def test_a_new_method_is_one_entry(monkeypatch):
    entry = Method("New", "a new one", "#123456", "*", METHODS["l-mcvae"].builder, METHODS["l-mcvae"].pieces)
    monkeypatch.setitem(METHODS, "new", entry)
    assert key_of(parse_key("new-sigmoid-k3-n2")) == "new-sigmoid-k3-n2"
    assert label_of("new-k3") == "New, K = 3"
    assert METHODS["new"].build(parse_key("new-k3"), 2).schedule.num_steps == 3


def test_every_likelihood_that_can_be_named_can_be_built():
    for name, entry in LIKELIHOODS.items():
        for kind in entry.transforms:
            mcvae.models.build_model((1, 8, 8), 2, network="mlp", likelihood=name, kind=kind, levels=2)


def test_the_room_of_runs_needs_no_torch_and_no_lightning():
    modules = sorted(f"mcvae.runs.{path.stem}" for path in (ROOT / "src/mcvae/runs").glob("[a-z]*.py"))
    assert len(modules) > 5
    program = f"import sys, {', '.join(modules)}; print([n for n in ('torch', 'lightning') if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "[]\n"


def test_no_two_modules_share_a_name():
    names = [path.stem for path in (ROOT / "src/mcvae").rglob("*.py") if not path.stem.startswith("__")]
    assert sorted(set(names)) == sorted(names)


def test_old_paths_still_work_and_say_where_to_go():
    from mcvae._moved import MOVED

    pairs = [(old, new) for old, new in MOVED.items() if old != "mcvae.recipes"]
    program = "import importlib as i\n" + "\n".join(
        f"assert i.import_module({old!r}).{name} is i.import_module({path!r}).{name}, {old!r}"
        for old, new in pairs
        for path in new.split()
        for name in import_module(path).__all__
    )
    done = subprocess.run([sys.executable, "-W", "always", "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for old, new in pairs:
        assert f"{old} is now {new}" in done.stderr
