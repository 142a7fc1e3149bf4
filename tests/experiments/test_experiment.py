"""The experiments that come with the package, and what a TOML file may not say."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from experiments.toml_files import KEYS, written

from otad.cip.surrogate import CipNetConfig
from otad.data import describe
from otad.errors import InputError
from otad.experiments import names
from otad.experiments.experiment import read_experiment
from otad.experiments.learn import config_of
from otad.training import RECIPES, MetricConfig, TrainConfig
from otad.training.config import LoopConfig

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
        config_of(TrainConfig, net.settings)
    for metric in experiment.metrics.values():
        config_of(MetricConfig, metric.train)
    for surrogate in experiment.surrogates.values():
        config_of(CipNetConfig, surrogate.train)
    for purifier in experiment.purifiers.values():
        config_of(LoopConfig, purifier.train)


def test_experiments_on_cifar10_share_what_they_learn() -> None:
    # Trained for fewer epochs on purpose.
    shorter = ("cifar10_pixels", "cifar10_cost", "cifar10_cost_single")
    shared = [name for name in names() if name.startswith("cifar10") and name not in shorter]
    found = [read_experiment(name) for name in shared]
    for table in ("nets", "metrics", "surrogates"):
        specs: dict[str, object] = {}
        for experiment in found:
            for key, spec in getattr(experiment, table).items():
                assert specs.setdefault(key, spec) == spec
    taught = [one.rows["OTAD-T"] for one in found if one.surrogates]
    first, *others = (replace(row, label="", attacks={}) for row in taught)
    assert all(other == first for other in others), "one CIP-net learns from the same answers"


def test_fgsm_without_warm_up_differs_in_it_alone() -> None:
    nets = [read_experiment(name).nets["fgsm"] for name in ("mnist_at", "mnist_fgsm")]
    with_it, without = (config_of(TrainConfig, net.settings) for net in nets)
    assert with_it.adversary is not None
    assert with_it.adversary.warmup > 0
    assert without == replace(with_it, adversary=replace(with_it.adversary, warmup=0.0))
    assert nets[0] == replace(nets[1], train=nets[0].train)


def test_an_included_file_gives_what_rows_use(tmp_path: Path) -> None:
    tables = ["[data.digits]", 'name = "digits"', "[data.other]", 'name = "wine"']
    for key, data in (("used", "digits"), ("unused", "other")):
        tables += [f"[nets.{key}]", f'data = "{data}"', f"[metrics.{key}]", 'data = "digits"']
        tables += ['kind = "pixels"', f"[quick.nets.{key}]", "blocks = 1"]
    written(tmp_path, "\n".join(tables), name="shared")
    own = """
title = "own"
include = "shared.toml"
[nets.used]
blocks = 3
[rows]
a = { net = "used", method = "otad", metric = "used" }
"""
    path = written(tmp_path, own)
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    for one in (slow, fast):
        assert [[*one.data], [*one.nets], [*one.metrics]] == [["digits"], ["used"], ["used"]]
        assert "include" not in one.source
        assert "unused" not in one.source["nets"]
    assert (slow.nets["used"].blocks, fast.nets["used"].blocks) == (3, 1)
    written(tmp_path, "[nets.used]\noptions.width = 2\nblocks = 2", name="later")
    both = 'include = ["shared.toml", "later.toml"]'
    path = written(tmp_path, own, ('include = "shared.toml"', both), ("blocks = 3", ""))
    assert read_experiment(path).nets["used"].blocks == 2, "the later file wins"
    with pytest.raises(InputError, match=r"absent.toml: expected a TOML file"):
        read_experiment(written(tmp_path, own, ("shared.toml", "absent.toml")))


def test_defaults_reach_every_net_and_row_and_are_overridden(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, SMALL))
    assert experiment.name == "small"
    assert experiment.nets["one"].train == {"epochs": 7, "learning_rate": 0.5}
    assert experiment.rows["plain"].n_neighbors == 4
    assert experiment.rows["otad"].n_neighbors == 5
    assert experiment.rows["otad"].label == "otad"
    path = written(tmp_path, SMALL, ("blocks = 2", 'blocks = 2\nrecipe = "vit_cifar10"'))
    settings = read_experiment(path).nets["one"].settings
    assert settings == RECIPES["vit_cifar10"] | {"epochs": 7, "learning_rate": 0.5}


def test_rows_name_attacks_or_change_them(tmp_path: Path) -> None:
    experiment = read_experiment(written(tmp_path, SMALL))
    assert experiment.rows["plain"].attacks == {}
    (blunt,) = experiment.rows["otad"].attacks.values()
    assert (blunt.name, blunt.eps, blunt.points, blunt.label) == ("pgd", 1.0, 1000, "blunt")
    changed = "attacks = { blunt = { eps = 2.0, options = { steps = 3 } } }"
    path = written(tmp_path, SMALL, ('attacks = ["blunt"]', changed))
    (blunt,) = read_experiment(path).rows["otad"].attacks.values()
    assert (blunt.name, blunt.eps, blunt.options) == ("pgd", 2.0, {"steps": 3})


def test_quick_changes_tables_but_replaces_data(tmp_path: Path) -> None:
    quick = """
[quick]
data.digits = { name = "wine", options = { test_fraction = 0.5 } }
train.epochs = 1
rows.otad.smoothness = 3.0
"""
    path = written(tmp_path, SMALL + quick)
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    assert (slow.data["digits"].name, slow.quick) == ("digits", False)
    assert (fast.data["digits"].name, fast.quick) == ("wine", True)
    assert fast.nets["one"].train == {"epochs": 1, "learning_rate": 0.5}
    assert (fast.rows["otad"].smoothness, fast.rows["otad"].n_neighbors) == (3.0, 5)
    assert fast.source["train"] == {"epochs": 1}


def test_an_entry_takes_the_settings_of_the_one_that_it_is_like(tmp_path: Path) -> None:
    more = """
[nets.three]
like = "two"
blocks = 3
[nets.two]
like = "one"
train = { learning_rate = 0.1, loss = "trades" }
[quick]
nets.one = { blocks = 1, train = { learning_rate = 0.2, epochs = 1 } }
"""
    path = written(tmp_path, SMALL + more)
    slow, fast = read_experiment(path), read_experiment(path, quick=True)
    learned = {"epochs": 7, "learning_rate": 0.1, "loss": "trades"}
    assert slow.nets["three"] == replace(slow.nets["one"], blocks=3, train=learned)
    assert [slow.nets[key].blocks for key in ("one", "two")] == [2, 2]
    assert [fast.nets[key].blocks for key in ("one", "two", "three")] == [1, 1, 3]
    assert fast.nets["two"].train == learned | {"epochs": 1}, "its own settings win"
    assert "like" not in slow.source["nets"]["two"], "a record has all settings"
    for other in ("three", "four"):
        circle = written(tmp_path, SMALL + more, ('like = "one"', f'like = "{other}"'))
        with pytest.raises(InputError, match=rf"two.like: expected one of one.*, got '{other}'"):
            read_experiment(circle)


PURIFIER = "[purifiers.soap]\nnet = 'one'\n"
CHOOSE = "choose = { setting = 'energy_weight', values = [0], row = 'otad' }"
EVALUATE = "[evaluate]\nrow = 'otad'\neps = [1.0]\nheadline = 1.0\n"


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("blocks = 2", "blocks = 2\nblock = 3", "nets.one: .* unknown key 'block'"),
        ("blocks = 2", 'kind = "magic"', "nets.one.kind: .*'prototypes'.*'magic'"),
        ("blocks = 2", 'blocks = "two"', "nets.one.blocks: expected int"),
        ("blocks = 2", 'kind = "prototypes"\nbank = "float16"', "bank: .*float16"),
        ("blocks = 2", 'bank = "int8"', "nets.one.bank: .*'int8'"),
        ('method = "net"', 'method = "magic"', "method: .*'magic'"),
        ('method = "net"', 'method = "net"\ncertify = { eps = [1.0] }', "certify: "),
        ('method = "net"', 'method = "net"\nmetric = "key"', "metric: "),
        ('method = "net"', 'method = "majority_knn"\nlipschitz = { radius = 1 }', "lipschitz: "),
        ('method = "otad"', 'method = "otad"\nscope = "wide"', "scope: .*'wide'"),
        ('method = "otad"', 'method = "otad"\nper_class = 0', "per_class: .*0"),
        ('method = "otad"', 'method = "otad"\ncentral = true', "central: "),
        ('method = "otad"', 'method = "otad"\nunread = 0.5', "unread: "),
        (
            'method = "otad"',
            'method = "otad"\nunread = 0.5\nscope = "global"',
            "unread: kind: .*soc",
        ),
        ('data = "digits"', 'data = "digit"', "nets.one.data: .*digits, got 'digit'"),
        ('net = "one"', 'net = "two"', "rows.plain.net: .*one, got 'two'"),
        ('method = "net"', 'method = "net"\nattacks = ["sharp"]', "attacks: .*blunt, got 'sharp'"),
        ('name = "pgd"', 'name = "magic"', "attack: .*random_step, .*got 'magic'"),
        ('name = "pgd"', 'name = "pgd"\nalso = { magic = {} }', "attack: .*got 'magic'"),
        ('name = "pgd"', 'name = "random_step"\nalso = { pgd = {} }', "also: .*random_step"),
        ("eps = 1.0", 'unit = "std"', "eps: .*std"),
        ("eps = 1.0", 'eps = 1.0\nnorm = "l7"', "norm: .*'l7'"),
        ("eps = 1.0", "eps = 1.0\npoints = 0", "points: .*0"),
        ('method = "net"', 'method = "net"\npublished = 3', "unknown key 'published'"),
        ("[otad]", EVALUATE.replace("otad", "plain") + "[otad]", "plain.method: .*otad.*'net'"),
        ("[otad]", EVALUATE.replace("otad", "none") + "[otad]", "evaluate.row: .*got 'none'"),
        ("[otad]", "[cost]\nnet = 'two'\nbanks = [1]\nqueries = 1\n[otad]", "cost.net: .*'two'"),
        ("[otad]", "[cost]\nnet = 'one'\nbanks = [1]\nqueries = 0\n[otad]", "queries.*0"),
        ("title", "include = '/a.toml'\ntitle", "include: expected a file in its own folder"),
        ("title", "include = '../a.toml'\ntitle", "include: expected a file in its own folder"),
        ("title", "include = [1]\ntitle", r"small.toml.include\[0\]: expected str, got 1"),
        ("title", "quick = 3\ntitle", "small.toml.quick: expected dict.*, got 3"),
        ("[nets.one]", "[nets]\ntwo = 3\n[nets.one]", "nets.two: expected dict.*, got 3"),
        ("train = {", "train = 3 # {", "nets.one.train: expected dict.*, got 3"),
        ('attacks = ["blunt"]', "attacks = 3", "rows.otad.attacks: expected tuple.*, got 3"),
        ('attacks = ["blunt"]', "attacks.blunt = 3", "attacks.blunt: expected dict.*, got 3"),
        ('title = "small"', "", "expected a value for 'title'"),
        ("[nets.one]", "[nets.one", "expected a TOML file"),
        ("blocks = 2", "untrained = true", "untrained: .*fc"),
        ('method = "net"', 'method = "net"\npurifier = "soap"', "plain.purifier: .*'soap'"),
        ('method = "otad"', 'method = "otad"\npurifier = "soap"', "purifier: expected none.*soap"),
        ("[otad]", PURIFIER + "kind = 'ape_gan'\n[otad]", "attack: .*'ape_gan' alone"),
        ("[otad]", PURIFIER + "kind = 'median_filter'\ntrain.epochs = 1\n[otad]", "train: "),
        ("[otad]", PURIFIER.replace("'one", "'two") + "kind = 'diffusion'\n[otad]", "soap.net: "),
        ("blocks = 2", CHOOSE.replace("[0]", "[]"), "values: .*one"),
        ("blocks = 2", CHOOSE.replace("otad", "no"), "nets.one.choose.row: .*'no'"),
        ("blocks = 2", CHOOSE.replace(" }", ", certified = 1 }"), "choose.certified: .*'1'"),
        ("[otad]", '[curve]\ntitle = "over L"\n[otad]', "curve: .*otad.*none"),
    ],
)
def test_refusals(tmp_path: Path, old: str, new: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        read_experiment(written(tmp_path, SMALL, (old, new)))


KNN = '[rows.knn]\nnet = "one"\nmethod = "majority_knn"\n'
WINE = '[data.wine]\nname = "wine"\n'


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('metric = "key"', 'metric = "lock"', "rows.taught.metric: .*key, got 'lock'"),
        ('surrogate = "quick"', 'surrogate = "slow"', "rows.taught.surrogate: .*'slow'"),
        ("n_neighbors = 5", "n_neighbors = 6", "rows.taught.surrogate: .*K = 6.*K = 5"),
        ('method = "otad"', 'method = "majority_knn"', "surrogate: "),
        ('method = "otad"', 'method = "otad"\nscope = "global"', "metric: .*'global'"),
        ('row = "otad"', 'row = "none"', "surrogates.quick.row: .*'none'"),
        ('data = "digits"', 'data = "digit"', "metrics.key.data: .*'digit'"),
        (
            '[metrics.key]\ndata = "digits"',
            f'{WINE}[metrics.key]\ndata = "wine"',
            "metric: .*digits, .*wine",
        ),
        ('kind = "pixels"', 'kind = "magic"', "metrics.key.kind: .*'magic'"),
        ('kind = "pixels"', 'kind = "pixels"\ntrain = { epochs = 1 }', "train: .*epochs"),
        ('kind = "pixels"', 'kind = "pretrained"', "features: .*''"),
        ('kind = "pixels"', 'kind = "cnn"\nnormalize = "row"', "normalize: .*'row'"),
        ('rows = ["otad"]', 'rows = ["none"]', "speed.rows: .*'none'"),
        ('rows = ["otad"]', f'rows = ["knn"]\n{KNN}', "method of knn: .*'majority_knn'"),
        ('row = "otad"', 'row = "taught"', "taught.surrogate: .*'quick'"),
        ('rows = ["otad"]', 'rows = ["otad"]\nplaces = ["moon"]', "places.*'moon'"),
    ],
)
def test_refusals_of_what_is_learned(tmp_path: Path, old: str, new: str, message: str) -> None:
    assert old in LEARNED
    with pytest.raises(InputError, match=message):
        read_experiment(written(tmp_path, SMALL + LEARNED.replace(old, new, 1)))


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ('net = "robust"\n[metrics.tuned]', "[metrics.tuned]", "net: expected one for classifier"),
        ('row = "softmax"\n', "", "row: expected one for tuned"),
        ('row = "softmax"', 'row = "classifier"', "metrics.tuned.row: .*central"),
        ('row = "softmax"', 'row = "tuned"', "metrics.tuned.row: .*not tuned"),
        ('metric = "tuned"', 'metric = "tuned", per_class = 4', "rows.tuned: .*5.*4"),
        (", adversary = { eps = 0.3, steps = 2 }", "", "rows.softmax.robust: .*adversary"),
        ("central = true, ", "", "robust: "),
        ('kind = "tuned"', 'kind = "tuned"\noptions = { key_dim = 2 }', "options: .*tuned"),
    ],
)
def test_refusals_of_keys_of_a_classifier(tmp_path: Path, old: str, new: str, message: str) -> None:
    read_experiment(written(tmp_path, KEYS))
    with pytest.raises(InputError, match=message):
        read_experiment(written(tmp_path, KEYS, (old, new)))


@pytest.mark.parametrize("kind", ["metric", "surrogate"])
def test_no_setting_is_chosen_by_a_row_with_a_metric_or_a_cip_net(
    tmp_path: Path, kind: str
) -> None:
    other = {"metric": 'surrogate = "quick"', "surrogate": 'metric = "key"'}[kind]
    whole = SMALL + LEARNED.replace(other, "")
    assert read_experiment(written(tmp_path, whole)).rows["taught"].method == "otad"
    choose = CHOOSE.replace("'otad'", "'taught'")
    with pytest.raises(InputError, match=r"choose.row: .*metric.*taught"):
        read_experiment(written(tmp_path, whole, ("blocks = 2", choose)))
