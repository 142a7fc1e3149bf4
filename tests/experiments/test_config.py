"""The experiments that come with the repository, and what is refused in a TOML file."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from otad.data import describe
from otad.errors import InputError
from otad.experiments import names
from otad.experiments.config import read_experiment
from otad.experiments.metrics import metric_config
from otad.experiments.shifts import SMAPE, E
from otad.experiments.surrogates import surrogate_config
from otad.training import RECIPES, TrainConfig

SMALL = """
title = "small"
[data.digits]
name = "digits"
[train]
epochs = 7
[otad]
n_neighbors = 4
[nets.one]
data = "digits"
blocks = 2
train = { learning_rate = 0.5 }
[attacks.blunt]
name = "pgd"
eps = 1.0
[rows.plain]
net = "one"
method = "net"
[rows.otad]
net = "one"
n_neighbors = 5
attacks = ["blunt"]
method = "otad"
"""


def small(folder: Path, old: str = "", new: str = "") -> Path:
    assert old in SMALL
    path = folder / "small.toml"
    path.write_text(SMALL.replace(old, new, 1) if old else SMALL + new, encoding="utf-8")
    return path


def test_every_result_asked_for_has_its_experiment() -> None:
    clean = {"mnist", "plain", "synthetic", "red_wine", "merfish", "cost"}
    vision = {"metrics", "nn", "robust", "energy", "cost"}
    assert set(names()) >= clean | {"mnist_attacks", "curvature", "suite", "cifar10", "imagenette"}
    assert set(names()) >= {f"cifar10_{name}" for name in vision}


def test_experiments_on_cifar10_share_what_they_learn() -> None:
    found = [read_experiment(name) for name in names() if name.startswith("cifar10")]
    for table in ("nets", "metrics", "surrogates"):
        specs: dict[str, object] = {}
        for experiment in found:
            for key, spec in getattr(experiment, table).items():
                assert specs.setdefault(key, spec) == spec
    taught = [one.rows["OTAD-T"] for one in found if one.surrogates]
    answers = [
        replace(row, label="", attacks={}, at_least={}, published={}, published_in="")
        for row in taught
    ]
    assert len(answers) == 2
    assert answers[0] == answers[1], "one CIP-net learns from the same answers"


def test_an_included_file_gives_what_rows_ask_for(tmp_path: Path) -> None:
    shared = """
[data.digits]
name = "digits"
[data.other]
name = "wine"
[nets.used]
data = "digits"
[nets.unused]
data = "other"
[metrics.used]
data = "digits"
kind = "pixels"
[metrics.unused]
data = "digits"
kind = "pixels"
[quick]
nets.used.blocks = 1
nets.unused.blocks = 1
"""
    (tmp_path / "shared.toml").write_text(shared, encoding="utf-8")
    own = """
title = "own"
include = "shared.toml"
[nets.used]
blocks = 3
[rows]
a = { net = "used", method = "otad", metric = "used" }
"""
    path = tmp_path / "own.toml"
    path.write_text(own, encoding="utf-8")
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    for one in (slow, fast):
        assert (list(one.data), list(one.nets), list(one.metrics)) == (
            ["digits"],
            ["used"],
            ["used"],
        )
        assert "include" not in one.source
        assert "unused" not in one.source["nets"]
    assert (slow.nets["used"].blocks, fast.nets["used"].blocks) == (3, 1)
    path.write_text(own.replace("shared.toml", "absent.toml"), encoding="utf-8")
    with pytest.raises(InputError, match=r"absent.toml: expected a TOML file"):
        read_experiment(path)


def test_of_several_included_files_the_later_wins_and_the_own_one_last(tmp_path: Path) -> None:
    net = '[data.digits]\nname = "digits"\n[nets.one]\ndata = "digits"\nblocks = {}\n'
    for name, blocks in (("first", 2), ("second", 3)):
        (tmp_path / f"{name}.toml").write_text(net.format(blocks), encoding="utf-8")
    row = '[rows.net]\nnet = "one"\nmethod = "net"\n'
    included = 'title = "own"\ninclude = ["first.toml", "second.toml"]\n'
    path = tmp_path / "own.toml"
    for change, blocks in (("", 3), ("[nets.one]\nblocks = 4\n", 4)):
        path.write_text(included + row + change, encoding="utf-8")
        assert read_experiment(path).nets["one"].blocks == blocks
    path.write_text('title = "own"\ninclude = ["first.toml", "none.toml"]\n' + row)
    with pytest.raises(InputError, match=r"none.toml: expected a TOML file"):
        read_experiment(path)


def test_a_recipe_is_what_training_settings_change(tmp_path: Path) -> None:
    path = small(tmp_path, "blocks = 2", 'blocks = 2\nrecipe = "vit_cifar10"')
    settings = read_experiment(path).nets["one"].settings
    assert settings == RECIPES["vit_cifar10"] | {"epochs": 7, "learning_rate": 0.5}


LEARNED = """
[metrics.key]
data = "digits"
kind = "pixels"
[surrogates.quick]
row = "otad"
[rows.taught]
net = "one"
method = "otad"
metric = "key"
surrogate = "quick"
n_neighbors = 5
[speed]
rows = ["otad"]
"""


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'metric = "key"',
            'metric = "lock"',
            "rows.taught.metric: expected one of key, got 'lock'",
        ),
        (
            'surrogate = "quick"',
            'surrogate = "slow"',
            "rows.taught.surrogate: expected one of quick",
        ),
        ("n_neighbors = 5", "n_neighbors = 6", "surrogate: expected one for one and K = 6"),
        ('row = "otad"', 'row = "none"', "surrogates.quick.row: expected one of plain, otad"),
        ('row = "otad"', 'row = "plain"', "surrogates.quick.row: expected a row of otad"),
        ('row = "otad"', 'row = "taught"', "surrogates.quick.row: expected a row of otad"),
        ('row = "otad"', 'row = "otad"\nalpha = 2.0', "alpha: expected a number from 0 to 1"),
        ('row = "otad"', 'row = "otad"\nheld_out = -1', "held_out: expected an integer"),
        ('data = "digits"', 'data = "digit"', "metrics.key.data: expected one of digits"),
        ('kind = "pixels"', 'kind = "magic"', "kind: expected one of resnet, cnn"),
        ('kind = "pixels"', 'kind = "pixels"\ntrain = { epochs = 1 }', "train: expected nothing"),
        ('kind = "pixels"', 'kind = "pretrained"', "features: expected one of efficientnet_lite0"),
        ('kind = "pixels"', 'kind = "cnn"\nfeatures = "own"', "features: expected for pretrained"),
        ('kind = "pixels"', 'kind = "cnn"\nnormalize = "row"', "normalize: expected one of none"),
        (
            'method = "otad"',
            'method = "net"',
            "metric: expected where neighbors are sought.*the net",
        ),
        (
            'method = "otad"',
            'method = "otad"\nscope = "global"',
            "metric: .*got it for global scope",
        ),
        ('method = "otad"', 'method = "majority_knn"', "surrogate: expected for otad alone"),
        ('method = "otad"', 'method = "otad"\nper_class = 0', "per_class: expected an integer"),
        ('method = "otad"', 'method = "otad"\ncentral = true', "central: expected with a metric"),
        ('rows = ["otad"]', 'rows = ["none"]', "speed.rows: expected one of plain, otad, taught"),
        ('rows = ["otad"]', 'rows = ["otad"]\nplaces = ["moon"]', "places: expected one of memory"),
        ('rows = ["otad"]', 'rows = ["otad"]\nratio_at_most = { x = 1 }', "speed.ratio_at_most"),
    ],
)
def test_refusals_of_what_is_learned(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LEARNED
    assert read_experiment(small(tmp_path, new=LEARNED)).rows["taught"].surrogate == "quick"
    with pytest.raises(InputError, match=message):
        read_experiment(small(tmp_path, new=LEARNED.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("new", "message"),
    [
        ('recipe = "magic"', "recipe: expected one of fc, vit_cifar10"),
        ('bank = "int8"', "bank: expected one of float32, float16"),
        ('kind = "prototypes"\nresident = false', "bank: expected float32 and resident"),
    ],
)
def test_refusals_of_nets(tmp_path: Path, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_experiment(small(tmp_path, "blocks = 2", f"blocks = 2\n{new}"))


def test_a_second_data_set_and_a_choice(tmp_path: Path) -> None:
    wine = LEARNED.replace('data = "digits"', 'data = "wine"') + '[data.wine]\nname = "wine"\n'
    with pytest.raises(
        InputError, match=r"rows.taught.metric: expected one on digits like the net"
    ):
        read_experiment(small(tmp_path, new=wine))
    choose = "blocks = 2\nchoose = { setting = 'energy_weight', values = [0], row = 'taught' }"
    path = small(tmp_path, "blocks = 2", choose)
    path.write_text(path.read_text(encoding="utf-8") + LEARNED, encoding="utf-8")
    with pytest.raises(InputError, match=r"choose.row: expected one without metric or CIP-net"):
        read_experiment(path)


@pytest.mark.parametrize("quick", [False, True])
@pytest.mark.parametrize("name", names())
def test_shipped_experiments_are_sound(name: str, quick: bool) -> None:
    experiment = read_experiment(name, quick=quick)
    assert experiment.rows or experiment.cost
    for data in experiment.data.values():
        known = describe(data.name)
        assert set(data.options) <= set(known.options)
        assert not (quick and known.needs_folder), "a quick run needs no files"
    for net in experiment.nets.values():
        TrainConfig(**net.settings)
    for metric in experiment.metrics.values():
        metric_config(metric.train)
    for surrogate in experiment.surrogates.values():
        surrogate_config(surrogate.train)
    for row in experiment.rows.values():
        assert bool(row.published) == bool(row.published_in)
        known = {"accuracy", "mse", "relative_error", "lipschitz", *row.attacks}
        known |= {f"{key} {measure}" for key in row.attacks for measure in (E, SMAPE)}
        known |= {f"certified {eps:g}" for eps in (row.certify.eps if row.certify else ())}
        assert set(row.at_least) <= known
        assert set(row.published) <= known


def test_defaults_reach_every_net_and_row_and_are_overridden(tmp_path: Path) -> None:
    experiment = read_experiment(small(tmp_path))
    assert experiment.name == "small"
    assert experiment.nets["one"].train == {"epochs": 7, "learning_rate": 0.5}
    assert experiment.rows["plain"].n_neighbors == 4
    assert experiment.rows["otad"].n_neighbors == 5
    assert experiment.rows["otad"].label == "otad"


def test_rows_name_attacks_or_change_them(tmp_path: Path) -> None:
    experiment = read_experiment(small(tmp_path))
    assert experiment.rows["plain"].attacks == {}
    (blunt,) = experiment.rows["otad"].attacks.values()
    assert (blunt.name, blunt.eps, blunt.points, blunt.label) == ("pgd", 1.0, 1000, "blunt")
    assert experiment.points_on("digits") == 1000
    changed = "attacks = { blunt = { eps = 2.0, options = { steps = 3 } } }"
    path = small(tmp_path, 'attacks = ["blunt"]', changed)
    (blunt,) = read_experiment(path).rows["otad"].attacks.values()
    assert (blunt.name, blunt.eps, blunt.options) == ("pgd", 2.0, {"steps": 3})


def test_quick_changes_tables_but_replaces_data(tmp_path: Path) -> None:
    quick = """
[quick]
data.digits = { name = "wine", options = { test_fraction = 0.5 } }
train.epochs = 1
rows.otad.smoothness = 3.0
"""
    path = small(tmp_path, new=quick)
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    assert (slow.data["digits"].name, slow.quick) == ("digits", False)
    assert (fast.data["digits"].name, fast.quick) == ("wine", True)
    assert fast.nets["one"].train == {"epochs": 1, "learning_rate": 0.5}
    assert (fast.rows["otad"].smoothness, fast.rows["otad"].n_neighbors) == (3.0, 5)
    assert fast.source["train"] == {"epochs": 1}


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blocks = 2", "blocks = 2\nblock = 3", "small.toml.nets.one: unknown key 'block'"),
        ("blocks = 2", 'kind = "magic"', "kind: expected one of fc, lifted, prototypes"),
        ("blocks = 2", "untrained = true", "untrained: expected for prototypes alone"),
        (
            'method = "otad"',
            'method = "otad"\nscope = "wide"',
            "scope: expected one of local, global",
        ),
        (
            'method = "net"',
            'method = "net"\ncertify = { eps = [1.0] }',
            "certify: expected for otad",
        ),
        (
            'method = "otad"',
            'method = "otad"\ncertify = { eps = [] }',
            "eps: expected at least one",
        ),
        (
            'method = "otad"',
            'method = "otad"\ncertify = { eps = [-1.0] }',
            "eps: expected a finite",
        ),
        ("blocks = 2", 'blocks = "two"', "nets.one.blocks: expected int"),
        ('data = "digits"', 'data = "digit"', "nets.one.data: expected one of digits, got 'digit'"),
        ('net = "one"', 'net = "two"', "rows.plain.net: expected one of one, got 'two'"),
        ('method = "net"', 'method = "magic"', "method: expected one of net, otad"),
        ('method = "net"', 'method = "net"\nattacks = ["sharp"]', "attacks: expected one of blunt"),
        ('name = "pgd"', 'name = "magic"', "attack: expected one of random_step, .*got 'magic'"),
        ('name = "pgd"', 'name = "pgd"\nalso = { magic = {} }', "attack: .*got 'magic'"),
        ('name = "pgd"', 'name = "random_step"\nalso = { pgd = {} }', "also: expected none beside"),
        ("eps = 1.0", "eps = -1.0", "eps: expected a finite number of at least 0, got -1.0"),
        ("eps = 1.0", "eps = inf", "eps: expected a finite number"),
        ("eps = 1.0", 'unit = "std"', "eps: expected a radius where features are in units of std"),
        ("eps = 1.0", 'eps = 1.0\nunit = "mile"', "unit: expected one of input, std"),
        ("eps = 1.0", 'eps = 1.0\non = "us"', "on: expected one of model, net"),
        ("eps = 1.0", 'eps = 1.0\nnorm = "l7"', "norm: expected one of l2, linf"),
        ("eps = 1.0", "eps = 1.0\npoints = 0", "points: expected an integer of at least 1"),
        (
            "[otad]",
            "[evaluate]\nrow = 'otad'\neps = [1.0]\nheadline = 2.0\n[otad]",
            "headline: expected one of eps",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'plain'\neps = [1.0]\nheadline = 1.0\n[otad]",
            "rows.plain.method: expected one of otad, got 'net'",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'otad'\neps = [1.0]\nheadline = 1.0\nat_most = { 2 = 5 }\n[otad]",
            "at_most: expected keys among 1, got '2'",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'otad'\neps = [1.0]\nheadline = 1.0\nat_most = { 1 = 5 }\n"
            "at_least = { worst = { 1 = 4 } }\n[otad]",
            "at_most: expected no bounds on both sides, got both at 1",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'none'\neps = [1.0]\nheadline = 1.0\n[otad]",
            "evaluate: expected one of plain, otad, got 'none'",
        ),
        (
            "[otad]",
            "[data.wine]\nname = 'wine'\n[nets.other]\ndata = 'wine'\n"
            "[rows.other]\nnet = 'other'\nmethod = 'otad'\n"
            "[evaluate]\nrow = 'otad'\ncertify = ['other']\neps = [1.0]\nheadline = 1.0\n[otad]",
            "evaluate: expected rows on digits like 'otad', .* got 'other' on wine",
        ),
        (
            'method = "otad"',
            'method = "net"\n[curve]\ntitle = "L"',
            "curve: expected at least one row of otad",
        ),
        (
            'method = "net"',
            'method = "majority_knn"\nlipschitz = { radius = 1 }',
            "lipschitz: expected for net or otad, got it for majority_knn",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'otad'\neps = [1.0, 0.5]\nheadline = 1.0\n[otad]",
            "eps: expected radii in ascending order, got \\[1.0, 0.5\\]",
        ),
        (
            "[otad]",
            "[evaluate]\nrow = 'otad'\neps = [1.0]\nheadline = 1.0\nspare_proved = ['square']\n"
            "attacks = { pgd = {} }\n[otad]",
            "spare_proved: expected one of pgd, got 'square'",
        ),
        ("title", "include = 5\ntitle", "small.toml.include: expected tuple.*, got 5"),
        ("title", "include = [1]\ntitle", r"small.toml.include\[0\]: expected str, got 1"),
        ("title", "quick = 3\ntitle", "small.toml.quick: expected dict.*, got 3"),
        ("title", "metrics = 3\ntitle", "small.toml.metrics: expected dict.*, got 3"),
        ("[nets.one]", "[nets]\ntwo = 3\n[nets.one]", "toml.nets.two: expected dict.*, got 3"),
        ("[rows.plain]", "[rows]\ntwo = 3\n[rows.plain]", "toml.rows.two: expected dict.*, got 3"),
        ("train = {", "train = 3 # {", "toml.nets.one.train: expected dict.*, got 3"),
        ('attacks = ["blunt"]', "attacks = 3", "rows.otad.attacks: expected tuple.*, got 3"),
        ('attacks = ["blunt"]', "attacks.blunt = 3", "attacks.blunt: expected dict.*, got 3"),
        ('title = "small"', "", "expected a value for 'title'"),
        ("[nets.one]", "[nets.one", "expected a TOML file"),
        ("[otad]", "[cost]\nnet = 'two'\nbanks = [1]\nqueries = 1\n[otad]", "cost.net"),
        ("[otad]", "[cost]\nnet = 'one'\nbanks = []\nqueries = 1\n[otad]", "banks: expected the"),
        ("[otad]", "[cost]\nnet = 'one'\nbanks = [1]\nqueries = 0\n[otad]", "queries: expected"),
        (
            "blocks = 2",
            "blocks = 2\nchoose = { setting = 'energy_weight', values = [0], row = 'no' }",
            "nets.one.choose.row: expected one of plain, otad, got 'no'",
        ),
        (
            "blocks = 2",
            "blocks = 2\nchoose = { setting = 'energy_weight', values = [], row = 'otad' }",
            "values: expected at least one to choose from, got none",
        ),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_experiment(small(tmp_path, old, new))


def test_unknown_names(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="unknown experiment 'minst', expected one of cifar10,"):
        read_experiment("minst")
    with pytest.raises(InputError, match="expected a TOML file"):
        read_experiment(tmp_path / "absent.toml")
