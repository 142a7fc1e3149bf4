"""An experiment in progress: what it loads, learns and measures, each made once (see `cache`)."""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from otad.attacks import ATTACKS
from otad.baselines import MajorityKnn, MeanFeatureKnn, Purified, Purifier, train_purifier
from otad.baselines.purifier_training import DEFAULTS, PurifierEpoch
from otad.checks import refusing
from otad.cip.surrogate import CipNet, CipNetConfig
from otad.cip.whole_bank.potential import BankPotential
from otad.data import Dataset, load, most_central, subset_per_class
from otad.evaluate.protocol import VERSION as PROTOCOL_VERSION
from otad.experiments import learn as making
from otad.experiments import records
from otad.experiments import rows as measuring
from otad.experiments.cache import WorkFolder, once
from otad.experiments.experiment import Experiment
from otad.experiments.learn import Learned, N, Source, config_of, peak_memory
from otad.experiments.spec import UNLEARNED, Choice, Options, RowSpec, name_of
from otad.io.codec import digest_of
from otad.io.tensor_files import fingerprint, read_tensors, write_tensors
from otad.model.answerer_options import solver_for
from otad.model.answerers import WholeBankAnswerer
from otad.model.defend import defend
from otad.model.folder import Block
from otad.model.imitation import imitate
from otad.model.otad import OTAD
from otad.model.prototypes import PrototypeNet
from otad.nets import Backbone, Metric, feature_lift, only_normalizes
from otad.progress import Counter, PartReport
from otad.threat import NORMS
from otad.training import Adversary, MetricConfig, TrainConfig, train, train_metric
from otad.training.config import LoopConfig

Part = TypeVar(
    "Part", records.RowRecord, records.AttackedScore, records.Regularity, records.CostRecord
)
KNN = {"mean_feature_knn": MeanFeatureKnn, "majority_knn": MajorityKnn}
# The settings of a row that decide its answers, beside its net, metric and CIP-net:
SOLVER = "mode climb max_smoothness spares potential"
MODEL = f"method n_neighbors scope smoothness strong_convexity {SOLVER} per_class central"
# What the last epoch of a training is recorded by; of others "train_score":
MEASURED = {"surrogates": ("error", "held_out_error"), "purifiers": ("loss",)}
Learn = Callable[..., Any]


@dataclass(eq=False)
class Study:
    """Loads, trains and measures what the rows of an experiment ask for, on first use."""

    experiment: Experiment
    report: PartReport
    work: WorkFolder
    data_dir: str | Path | None = None
    device: str = "cpu"
    seed: int = 0
    made: dict[tuple[str, str], Any] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)
    candidates: dict[str, tuple[records.Candidate, ...]] = field(default_factory=dict)
    _bank: tuple[tuple[str, float | None], OTAD] | None = None

    @once
    def source(self, key: str) -> Source:
        self.report(f"load {key}", 0, 1)
        spec = self.experiment.data[key]
        with refusing(f"data.{key}: expected options of {spec.name}"):
            data = load(spec.name, self.data_dir, seed=self.seed, **spec.options)
        self.experiment.check_data(key, data)
        self.report(f"load {key}", 1, 1)
        return Source(data, data.fingerprint())

    def data(self, row: RowSpec) -> Dataset:
        return self.source(self.experiment.nets[row.net].data).data

    @once
    def net(self, key: str) -> Learned[Backbone]:
        """A net, trained with the setting that its table `choose` chooses, if there is one."""
        spec = self.experiment.nets[key]
        settings, source = spec.settings, self.source(spec.data)
        if spec.choose is not None:
            found = tuple(self._try(key, spec.choose, value) for value in spec.choose.values)
            best = max(found, key=lambda candidate: candidate.score.rank)
            self.candidates[key] = found
            settings = settings | {spec.choose.setting: best.value}
        config = config_of(TrainConfig, settings, seed=self.seed, device=self.device)
        net = making.fresh_net(spec, source.data, self.seed, self.device)
        if spec.untrained:
            return self._learned(key, net, asdict(config), {"train_score": None})
        # Options decide how prototypes are drawn, which their configuration does not show.
        identity = [source.fingerprint, spec.normalize, spec.options]
        learn = partial(train, net, source.train, config)
        return self._train("nets", key, net, config, identity, learn)

    def _try(self, key: str, choice: Choice, value: float) -> records.Candidate:
        """The score of a value, from an experiment of its own on the train part."""
        spec, label = self.experiment.nets[key], f"{key} with {choice.setting} = {value:g}"
        train = spec.train | {choice.setting: value}
        train |= {} if choice.epochs is None else {"epochs": choice.epochs}
        row = self.experiment.rows[choice.row].in_trial
        nets = {key: replace(spec, train=train, choose=None)}
        none: Options = dict.fromkeys(("cost", "speed", "evaluate"))
        none |= {"surrogates": {}, "metrics": {}}
        trial = replace(self.experiment, nets=nets, rows={choice.row: row}, **none)

        def report(name: str, done: int, total: int) -> None:
            self.report(f"{label}: {name}", done, total)

        study = replace(self, experiment=trial, report=report, made={}, seconds={}, _bank=None)
        part = self.source(spec.data).validation_part(choice.validation, self.seed)
        study.made["source", spec.data] = part
        record = study.row(choice.row)
        self.seconds |= {f"{label}: {name}": took for name, took in study.seconds.items()}
        if choice.certified is None:
            return records.Candidate(value, record.score)
        return records.Candidate(value, record.certified[name_of(choice.certified)])

    @once
    def metric(self, key: str) -> Learned[Metric]:
        spec, label = self.experiment.metrics[key], f"metric {key}"
        source, more = self.source(spec.data), Options()
        identity: list[Any] = [source.fingerprint, spec.normalize]
        if spec.row is not None:
            row = self.experiment.rows[spec.row]
            first, more["bank_rows"] = self.metric(row.metric or ""), self.bank_rows(row)
            net, identity = copy.deepcopy(first.net), [*identity, first.identity, fingerprint(more)]
        else:
            classifier = None if spec.net is None else self.net(spec.net).net
            net = making.fresh_metric(spec, source.data, self.seed, classifier)
        about = {"key_dim": net.key_dim, "lipschitz": net.lipschitz}
        if spec.kind in UNLEARNED:
            self.report(f"train {label}", 1, 1)
            return self._learned(label, net, None, about)
        config = config_of(MetricConfig, spec.train, seed=self.seed, device=self.device)
        learn = partial(train_metric, net, source.train, config, **more)
        found = self._train("metrics", label, net, config, identity, learn)
        return replace(found, record=replace(found.record, results=about | found.record.results))

    @once
    def surrogate(self, key: str) -> Learned[CipNet]:
        spec, generator = self.experiment.surrogates[key], torch.Generator().manual_seed(self.seed)
        model = self.defended(spec.row)
        config = config_of(CipNetConfig, spec.train, seed=self.seed, device=self.device)
        with refusing("options: expected those of CipNet"):
            sizes = model.backbone.dim, model.n_neighbors
            net = CipNet(*sizes, generator=generator, **spec.options)

        def learn(**saving: Any) -> Any:
            taught = {"alpha": spec.alpha, "held_out": spec.held_out, **saving}
            return imitate(model, config, net=net, **taught).result

        identity = [self.identity(spec.row), spec.alpha, spec.held_out]
        return self._train("surrogates", f"surrogate {key}", net, config, identity, learn)

    @once
    def purifier(self, key: str) -> Learned[Purifier]:
        spec, label = self.experiment.purifiers[key], f"purifier {key}"
        net, source = self.net(spec.net), self.source(self.experiment.nets[spec.net].data)
        purifier = making.fresh_purifier(spec, net.net, self.seed)
        if spec.kind == "median_filter":
            self.report(f"train {label}", 1, 1)
            return self._learned(label, purifier, None, {})
        place = {"seed": self.seed, "device": self.device}
        config = config_of(LoopConfig, DEFAULTS | spec.train, **place)
        identity: list[Any] = [source.fingerprint]
        about = Options(settings=asdict(config))
        if spec.attack is not None:
            identity += [net.identity, asdict(spec.attack)]
            threat = NORMS[spec.attack.norm](spec.attack.eps)
            about |= {"net": net.net, "threat": threat, "steps": spec.attack.steps}

        def learn(**saving: Any) -> Any:
            losses = train_purifier(purifier, source.data.train_x, **about, **saving)
            epochs = [PurifierEpoch(number, loss) for number, loss in enumerate(losses, 1)]
            return SimpleNamespace(history=epochs)

        return self._train("purifiers", label, purifier, config, identity, learn)

    def _train(
        self, kind: str, label: str, net: N, config: LoopConfig, identity: Any, learn: Learn
    ) -> Learned[N]:
        """A net that `learn` trains, or trained in an earlier run."""
        settings, report = asdict(config), partial(self.report, f"train {label}")
        name = {"net": net.config(), "settings": settings, "identity": identity}

        def run(**saving: Any) -> tuple[int, Options]:
            with peak_memory(self.device) as memory:
                history = learn(**saving).history
            measured = MEASURED.get(kind, ("train_score",))
            return len(history), {key: getattr(history[-1], key) for key in measured} | memory

        results = self.work.trained(kind, name, net, config.epochs, run, report)
        return self._learned(label, net, settings, results, results.pop("seconds"))

    def _learned(
        self, label: str, net: N, train: Options | None, results: Options, seconds: float = 0.0
    ) -> Learned[N]:
        """Return a trained network with the digests of its weights and of the settings that weights
        do not show."""
        identity = {"weights": fingerprint(net.state_dict()), "config": digest_of(net.config())}
        parameters = sum(one.numel() for one in net.parameters())
        record = records.LearnedRecord(train, results, parameters, identity["weights"], seconds)
        self.seconds[f"train {label}"] = seconds
        return Learned(net.to(self.device).eval(), identity, record)

    @contextmanager
    def timed(self, label: str) -> Iterator[Counter]:
        """Record the seconds of a block, whose progress is reported under a label."""
        started = time.perf_counter()
        yield partial(self.report, label)
        self.seconds[label] = time.perf_counter() - started

    def bank(self, net: str, unread: float | None = None) -> OTAD:
        """OTAD over the whole bank of a net. Only the last one is held: banks are large."""
        if self._bank is None or self._bank[0] != (net, unread):
            self._bank = None
            spec, backbone = self.experiment.nets[net], self.net(net).net
            backbone = backbone if unread is None else feature_lift(backbone, unread).eval()
            source, dtype = self.source(spec.data), getattr(torch, spec.bank)
            with self.timed(f"bank of {net}") as report:
                if isinstance(backbone, PrototypeNet):
                    model = OTAD(backbone, backbone.bank(), n_neighbors=1)
                else:
                    options: Options = {"n_neighbors": 1, "bank_dtype": dtype, "progress": report}
                    model = defend(backbone, *source.train, **options)
            self._bank = (net, unread), model
        return self._bank[1]

    @once
    def keys(self, metric: str) -> Tensor:
        """The keys (N,m) of the whole train part."""
        net = self.metric(metric).net
        x = self.source(self.experiment.metrics[metric].data).data.train_x
        with self.timed(f"keys by {metric}") as report, torch.no_grad():
            batches = measuring.batches_of(x, net.mean.device, report)
            return torch.cat([net(part) for part in batches])

    @once
    def right(self, net: str) -> Tensor:
        """Which train points (N,) a net gets right under the adversary that it was trained with."""
        spec, source = self.experiment.nets[net], self.source(self.experiment.nets[net].data)
        adversary = cast(Adversary, config_of(TrainConfig, spec.settings).adversary)
        with self.timed(f"train points that {net} gets right") as report:
            of = measuring.RowContext(
                model := self.net(net).net, model, source.data, self.seed, report
            )
            return measuring.right_under_attack(of, adversary)

    def bank_rows(self, row: RowSpec) -> Tensor | None:
        """The points of the train part that are in the bank of a row, None for all."""
        if row.per_class is None:
            return None
        labels = self.data(row).train_y
        if row.central:
            first = self.experiment.first_metric(row)
            keys, classifier = self.keys(first), self.experiment.metrics[first].net
            among = self.right(classifier) if row.robust and classifier else None
            return most_central(keys, labels.to(keys.device), row.per_class, among=among).cpu()
        return subset_per_class(labels, row.per_class, torch.Generator().manual_seed(self.seed))

    def base(self, row: RowSpec) -> OTAD:
        """OTAD over the bank of a row, with its metric and otherwise default settings."""
        base, rows, changes = self.bank(row.net, row.unread), self.bank_rows(row), Options()
        if rows is not None:
            changes["bank"] = base.bank.select(rows.to(base.bank.labels.device))
        if row.metric is not None:
            keys = self.keys(row.metric)
            changes["keys"] = keys if rows is None else keys[rows.to(keys.device)]
            changes["metric"] = self.metric(row.metric).net
        return base.replace(**changes) if changes else base

    def model(self, key: str) -> nn.Module:
        """What answers in a row: the defense, the net alone or a k-NN over the same bank."""
        row = self.experiment.rows[key]
        if row.method in KNN:
            return KNN[row.method](self.base(row), row.n_neighbors).eval()
        if row.purifier is not None:
            return Purified(self.net(row.net).net, self.purifier(row.purifier).net)
        return self.net(row.net).net if row.method == "net" else self.defended(key)

    def defended(self, key: str) -> OTAD:
        row, found = self.experiment.rows[key], self.potential(key)
        surrogate = None if row.surrogate is None else self.surrogate(row.surrogate).net
        return self.base(row).replace(
            scope=row.scope,
            n_neighbors=row.n_neighbors,
            smoothness=row.smoothness,
            strong_convexity=row.strong_convexity,
            potential=None if found is None else found[0],
            solver=surrogate
            or solver_for(row.scope, **{name: getattr(row, name) for name in SOLVER.split()}),
        )

    def potential(self, key: str) -> tuple[BankPotential, records.PotentialRecord] | None:
        """The potential of a row's global map; None for other rows."""
        row = self.experiment.rows[key]
        if row.method != "otad" or row.uses_neighbors:
            return None
        name, label = digest_of({"potential": self.identity(key)}), f"potential of {row.net}"
        path = self.work.folder / "potentials" / f"{name}.safetensors"
        with self.work.lock(name):
            if not path.exists():
                curvature = {"smoothness": row.smoothness, "strong_convexity": row.strong_convexity}
                with self.timed(label):
                    model = self.base(row).replace(scope=row.scope, **curvature)
                block, seconds = cast(Block, model.answerer.block()), self.seconds[label]
                write_tensors(path, block.tensors, {"entry": block.entry, "seconds": seconds})
            tensors, about = read_tensors(path)
        self.report(label, 1, 1)
        found = WholeBankAnswerer.restore({}, about["entry"], tensors)["potential"]
        scalars = found.smoothness, found.strong_convexity, found.sweeps, found.violation
        left_out = tuple(found.left_out.tolist())
        return found, records.PotentialRecord(*scalars, left_out, about["seconds"])

    def train_inputs(self, row: RowSpec) -> Tensor | None:
        """The training inputs of a row's bank, where the bank itself does not show them."""
        if only_normalizes(self.net(row.net).net):
            return None
        rows, x = self.bank_rows(row), self.data(row).train_x
        return x if rows is None else x[rows]

    def identity(self, key: str) -> dict[str, Any]:
        """Return everything that decides the answers of a row's model on its device."""
        row = self.experiment.rows[key]
        more = {"purifier": self.purifier(row.purifier).identity} if row.purifier else Options()
        more |= {"robust": True} if row.robust else {}
        return more | {
            "net": self.net(row.net).identity,
            "data": self.source(self.experiment.data_of(key)).fingerprint,
            "bank": self.experiment.nets[row.net].bank + f" {row.unread}" * bool(row.unread),
            "model": {name: getattr(row, name) for name in MODEL.split()},
            "metric": row.metric and self.metric(row.metric).identity,
            "surrogate": row.surrogate and self.surrogate(row.surrogate).identity,
            "device": self.device,
            "seed": self.seed,
        }

    def row(self, key: str) -> records.RowRecord:
        """Measure a row without attacks."""
        row = self.experiment.rows[key]

        def measure(report: Counter) -> records.RowRecord:
            found = self.potential(key)
            return measuring.measure_row(row, self._context(key, report), found and found[1])

        identity = [self.identity(key), row.certify, row.lipschitz]
        return self.part(key, records.RowRecord, identity, measure)

    def attack(self, key: str, name: str) -> records.AttackedScore:
        row = self.experiment.rows[key]
        spec = replace(row.attacks[name], label="")
        versions = [ATTACKS[run].version for run in spec.runs if run in ATTACKS]
        identity = [self.identity(key), spec, PROTOCOL_VERSION, versions]

        def measure(report: Counter) -> records.AttackedScore:
            return measuring.attack_row(spec, self._context(key, report), self.train_inputs(row))

        return self.part(f"{key}: {name}", records.AttackedScore, identity, measure)

    def regularity(self, net: str) -> records.Regularity | None:
        """Measure the regularity of a network that OTAD defends by neighbors, with the neighbors of
        the first such row."""
        rows, asked = self.experiment.rows, (net, "otad", True)
        keys = [k for k, row in rows.items() if (row.net, row.method, row.uses_neighbors) == asked]
        if not keys:
            return None

        def measure(report: Counter) -> records.Regularity:
            return measuring.measure_regularity(self._context(keys[0], report))

        name = f"regularity of {net}"
        return self.part(name, records.Regularity, self.identity(keys[0]), measure)

    def _context(self, key: str, report: Counter) -> measuring.RowContext:
        row, model = self.experiment.rows[key], self.model(key)
        net, data = self.net(row.net).net, self.data(row)
        return measuring.RowContext(model, net, data, self.seed, report)

    def part(
        self, label: str, kind: type[Part], identity: Any, measure: Callable[[Counter], Part]
    ) -> Part:
        """What `measure` finds, or found in an earlier run; its seconds are recorded."""
        name = [kind.__name__, measuring.VERSION, identity]
        found = self.work.part(kind, name, lambda: measure(partial(self.report, label)))
        self.report(label, 1, 1)
        self.seconds[label] = found.seconds or 0.0
        return found
