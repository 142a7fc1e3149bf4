"""Networks of every kind are defended, saved, loaded, evaluated; bank points keep their answers."""

from __future__ import annotations

import copy
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from factories import images, refuses
from model import architectures
from model.architectures import AS_JSON, NETS, OF_VALUES, data, make, outputs, sequential_cnn
from torch import Tensor, nn
from torch.nn.utils import weight_norm as old_weight_norm
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import otad
from otad.errors import SolverError
from otad.model.otad import OTAD
from otad.nets.features import find_head

EVERY = pytest.mark.parametrize("name", NETS)


def test_labels_that_the_network_does_not_give_cause_a_warning() -> None:
    """Classes that are counted from 1, for example."""
    x = torch.rand(80, 4, generator=torch.Generator().manual_seed(0))
    net = nn.Sequential(nn.Linear(4, 4))
    with torch.no_grad():
        net[0].weight.copy_(torch.eye(4))
        net[0].bias.zero_()
    labels = x.argmax(1)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        otad.defend(net, x, labels)
        assert not [one for one in said if "less than by chance" in str(one.message)]
        otad.defend(net, x, (labels + 1) % 4)
    (found,) = [one for one in said if "less than by chance" in str(one.message)]
    assert str(found.message).startswith("y: the network gives the labels of 0.0% of 80 ")
    assert found.filename == __file__


def defended(name: str, **options: object) -> OTAD:
    x, y = data(name)
    return otad.defend(make(name), x, y, **({"n_neighbors": 4} | options))


@EVERY
def test_a_backbone_is_the_network_itself(name: str) -> None:
    net, x = make(name), data(name, 20, seed=5)[0]
    backbone = otad.nets.adapt(
        net, sample=x[:3], task="regression" if name in OF_VALUES else "classification"
    )
    expected = outputs(net, x)
    if name == "log-softmax":
        torch.testing.assert_close(backbone(x).log_softmax(1), expected, rtol=1e-4, atol=1e-5)
    else:
        torch.testing.assert_close(backbone(x), expected, rtol=1e-4, atol=1e-5)
    assert isinstance(backbone, otad.nets.SequentialBackbone) is (name == "residual")


@EVERY
@pytest.mark.parametrize("scope", ["local", "global"])
def test_bank_points_keep_the_answers_of_the_network(name: str, scope: str) -> None:
    model = defended(name, scope=scope)
    x, _ = data(name)
    expected = model.backbone(x).detach()
    torch.testing.assert_close(model(x), expected, rtol=1e-3, atol=1e-4)
    assert model.notes["defense"]["path"] == ("transport" if name == "residual" else "features")
    if name != "residual":
        assert (model.potential is None) or len(model.potential.left_out) == 0
        assert model.smoothness <= 2
        answers = model(data(name, 30, seed=7)[0])  # mixtures of those of bank points
        low, high = (bound(0).values for bound in (expected.min, expected.max))
        assert bool(((answers >= low - 1e-4) & (answers <= high + 1e-4)).all())


@EVERY
def test_end_to_end(name: str, tmp_path: Path) -> None:
    model = defended(name)
    model.save(tmp_path)
    x, y = data(name, 6, seed=3)
    before = model(x).detach()
    if name in AS_JSON:
        again = otad.load(tmp_path)
        assert torch.equal(again(x), before)
    else:
        refuses(otad.load, tmp_path, match=r"net: .*architectures\.\w+, .*otad\.load\(folder, net=")
    again = otad.load(tmp_path, net=make(name, seed=4))  # its weights are replaced
    assert torch.equal(again(x), before)
    assert repr(again) == repr(model)  # with as many weights: layers stay shared
    assert again.notes == model.notes
    attacks = [otad.attacks.Pgd(steps=2), otad.attacks.RandomNoise(draws=2)]
    found = otad.evaluate(again, x, y, threat=otad.L2(0.3), attacks=attacks, flags=False)
    assert found.n == 6
    assert {record.attack for record in found.attacks} == {"pgd", "noise"}
    assert (found.certificate is not None) is (name == "residual")


@pytest.mark.parametrize("name", ["own CNN", "sequential transformer"])
def test_a_factory_gives_the_module(name: str, tmp_path: Path) -> None:
    model, x = defended(name, scope="global"), data(name, 5, seed=3)[0]
    model.save(tmp_path)
    again = otad.load(tmp_path, net=lambda: make(name, seed=9), resident=False)
    assert torch.equal(again(x), model(x))
    assert again.potential is not None


@pytest.mark.parametrize("how", [weight_norm, old_weight_norm, spectral_norm, orthogonal])
def test_saving_says_that_the_code_of_a_parametrization_is_not_in_the_folder(
    how: Callable[[nn.Module], nn.Module], tmp_path: Path
) -> None:
    def normed() -> nn.Module:
        return nn.Sequential(how(nn.Linear(4, 8)), nn.ReLU(), how(nn.Linear(8, 3)))

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # the old one is deprecated
        net, fresh = normed(), normed()
    x = torch.rand(30, 4)
    model = otad.defend(net, x, torch.arange(30) % 3)
    message = r"net: .*\.Sequential, but not its code: .*net=\.\.\."
    with pytest.warns(UserWarning, match=message) as said:
        model.save(tmp_path / "model")
    assert [one.filename for one in said] == [__file__]
    refuses(otad.load, tmp_path / "model", match=r"net: .*otad\.load\(folder, net=")
    assert torch.equal(otad.load(tmp_path / "model", net=fresh)(x), model(x))
    refuses(otad.nets.save_net, model.backbone, tmp_path / "net", match="net: .*needs code: torch")
    assert not (tmp_path / "net").exists()


class OtherActivation(architectures.OwnCNN):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).tanh()


def test_the_wrong_module_is_refused(tmp_path: Path) -> None:
    defended("own CNN").save(tmp_path)
    wrong = architectures.OwnCNN()
    wrong.conv = nn.Conv2d(1, 4, 3, padding=1, bias=False)
    larger = architectures.OwnCNN()
    larger.hidden, larger.out = nn.Linear(64, 13), nn.Linear(13, 3)
    for net, message in {
        nn.Linear(3, 2): "net: .*the Linear layer 'out', got Linear",
        wrong: "net: expected weights that fit .*net.conv.bias",
        larger: "net: expected OwnCNN with layers of the sizes that were saved, .*dimension 13",
        OtherActivation(): "net: .*outputs noted in the folder, got OtherActivation",
    }.items():
        refuses(otad.load, tmp_path, net=net, match=message)
    refuses(otad.load, tmp_path, net=lambda: 3, match="net: expected a function that makes")
    complete = tmp_path / "complete"
    defended("residual").replace(backbone=otad.nets.fc_resnet((1, 8, 8), 3, blocks=1)).save(
        complete
    )
    refuses(otad.load, complete, net=wrong, match="net: expected None, as the FCResNet")


def test_what_was_chosen_is_said_once_and_noted() -> None:
    for name, words in {
        "residual": "OTAD as in the paper: the 64 features that enter Residual.head",
        "own CNN": "the defense works on the 12 features that enter OwnCNN.out.*transport energy",
        "log-softmax": "the defense .* outputs of Sequential.3 are its logits",
    }.items():
        with pytest.warns(UserWarning, match=f"^defense: {words}") as said:
            model = defended(name)
        assert len(said) == 1
        assert str(said[0].message) == f"defense: {model.notes['defense']['says']}"
        assert said[0].filename == __file__
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        x, y = data("own CNN")
        made = otad.defend(otad.nets.fc_resnet((1, 8, 8), 3, blocks=1), x, y)
    assert "defense" not in made.notes


def test_modules_that_ran_compiled_before() -> None:
    x, y = data("own CNN")
    in_place, inside = make("own CNN"), make("compiled")
    in_place.compile(backend="eager")
    for net in (in_place, architectures.Wrapper(inside)):
        before = net(x).detach()
        model = otad.defend(net, x, y, n_neighbors=4)
        torch.testing.assert_close(model(x), before, rtol=1e-4, atol=1e-4)


def test_the_lift_over_features_can_be_asked_for() -> None:
    asked = defended("residual", inputs="features", bounds=(0.0, 1.0))
    assert asked.notes["defense"]["path"] == "features"
    assert asked.backbone.bounds == (0.0, 1.0)
    refuses(asked, data("residual")[0] + 1, match="bounds")
    with pytest.raises(otad.InputError, match=r"embedding_lipschitz: .*Lift.*inputs='pixels'"):
        otad.certify(asked, data("residual")[0][:2])
    # With a stated constant, and with a metric of known constant, there is a proof.
    assert len(otad.certify(asked, data("residual")[0][:2], embedding_lipschitz=5.0)) == 2
    x, y = images()
    net, plain = sequential_cnn(), {"input_shape": (1, 8, 8), "key_norm": "free"}
    for metric in (
        nn.Flatten(),
        otad.nets.PretrainedMetric(nn.Flatten(), std=0.5, **plain),
        otad.nets.LipschitzMetric((1, 8, 8), key_dim=4, widths=(4,), depth=1),
    ):
        with pytest.warns(UserWarning, match="defense") as said:
            model = otad.defend(net, x, y, metric=metric, n_neighbors=2)
        assert "nothing is proved" not in str(said[0].message)
        found = otad.certify(model, x)
        assert float(found.radius.max()) > 0
        nearby = x + torch.nn.functional.normalize(torch.ones_like(x), dim=(1, 2, 3)) * (
            found.radius.float()[:, None, None, None].clamp_max(9) * 0.99
        )
        assert torch.equal(model(nearby).argmax(1), found.prediction)
    assert otad.nets.PretrainedMetric(nn.Flatten(), std=0.5, **plain).lipschitz == 2
    assert (
        otad.nets.PretrainedMetric(nn.Tanh(), input_shape=(4,), key_norm="free").lipschitz is None
    )


def test_features_of_another_direction_are_no_transport() -> None:
    class Shuffled(architectures.Residual):
        def forward(self, x: Tensor) -> Tensor:
            return self.head(-x.flatten(1))

    x, y = data("residual")
    assert otad.defend(Shuffled(), x, y).notes["defense"]["path"] == "features"
    layers = nn.Flatten(), nn.Linear(64, 64), nn.Linear(64, 3)
    mirror = nn.Sequential(*layers)
    with torch.no_grad():
        mirror[1].weight.copy_(-torch.eye(64))
    said = otad.defend(mirror, x, y).notes["defense"]
    assert said["path"] == "transport"
    assert "train with the transport energy" in said["says"]


@pytest.mark.parametrize("tail", [(), (nn.Sigmoid(),), (nn.Flatten(0),)])
def test_one_logit_is_two_classes(tail: tuple[nn.Module, ...]) -> None:
    x, _ = data("own CNN")
    net = make("log-softmax")[:3]
    head = nn.Linear(10, 1)
    with torch.no_grad():
        features = net(x)
        head.weight.copy_(torch.linspace(-1, 1, 10))
        head.bias.copy_(-(features @ head.weight.T).mean())
        logit = head(features)[:, 0]
    model = otad.defend(nn.Sequential(*net, head, *tail), x, (logit > 0).long(), n_neighbors=3)
    expected = torch.stack([torch.zeros_like(logit), logit], 1)
    torch.testing.assert_close(model.backbone(x), expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)


class Scores(nn.Module):
    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {"loss": x.sum(), "scores": x.flatten(1)}


class TwoHeads(nn.Module):
    """Returns a function of the outputs of `main`, and then those of `other`."""

    def __init__(self, classes: int, last: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.last, self.main, self.other = last, nn.Linear(64, classes), nn.Linear(64, classes)
        with torch.no_grad():  # nearly always the same class, as in two trained heads
            self.other.weight.copy_(self.main.weight + 0.01 * self.other.weight)
            self.other.bias.copy_(self.main.bias)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        flat = x.flatten(1)
        return self.last(self.main(flat)), self.other(flat)


class Mean(TwoHeads):
    """The mean of two heads is the output of none."""

    def __init__(self) -> None:
        super().__init__(3, nn.Identity())
        with torch.no_grad():
            self.other.weight.copy_(self.main.weight.flip(1))

    def forward(self, x: Tensor) -> Tensor:
        return sum(super().forward(x)) / 2


class FeaturesFirst(nn.Sequential):
    """Returns its features, and then the outputs."""

    def __init__(self) -> None:
        super().__init__(nn.Flatten(), nn.Linear(64, 5), nn.Linear(5, 3))

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        features = self[1](self[0](x))
        return features, self[2](features)


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x[:, 0]).mean(1)


@pytest.mark.parametrize(
    ("net", "y", "message"),
    [
        (Tokens(), 0, r"net: .*\(B,f\), got 'head' on \(32, 8, 8\)"),
        (nn.Sequential(nn.Flatten(), nn.ReLU()), 0, "net: expected a last Linear .*end with"),
        (nn.Sequential(nn.Linear(5, 2)), 0, "net: expected a module that takes .*1, 8, 8"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3), nn.Softmin(1)), 0, "net: .*in their order"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 1), nn.Sigmoid()), 0.5, "net: .*last Linear"),
        (nn.Sequential(nn.Flatten(), nn.Linear(64, 3)), 0.5, "net: .*one output.*int64.*got 3"),
        (nn.LSTM(8, 3), 0, "net: expected"),
        (Scores(), 0, r"net: .*\.logits, got a mapping of loss, scores"),
        (FeaturesFirst(), 0, r"net: .*\.logits, got a tuple of tensors \(32, 5\), \(32, 3\)"),
        (Mean(), 0, "net: .*in their order"),
    ],
)
def test_other_networks_are_refused(net: nn.Module, y: float, message: str) -> None:
    x, labels = data("own CNN")
    refuses(otad.defend, net, x, labels if y == 0 else x[:, 0, 0, 0], match=message)


def test_other_options_are_refused() -> None:
    metric = otad.nets.CNNMetric((3, 8, 8), widths=(2, 2), key_dim=2)
    match = r"metric: .*\(1, 8, 8\).*got one for \(3, 8, 8\)"
    refuses(otad.defend, make("own CNN"), *data("own CNN"), match=match, metric=metric)
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'smothness'; .*smoothness"):
        otad.defend(make("own CNN"), *data("own CNN"), smothness=3.0)


def test_nets_are_not_changed_but_for_their_mode() -> None:
    net, x = make("ResNet").train(), data("ResNet")[0]
    state = copy.deepcopy(net.state_dict())
    otad.nets.adapt(net, sample=x)
    assert net.training
    otad.defend(net, *data("ResNet"))
    assert not net.training
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, state[name]), name


def test_copies_dtypes_and_threads() -> None:
    model, (x, _) = defended("own CNN"), data("own CNN", 30, seed=2)
    wide = copy.deepcopy(model).double()
    torch.testing.assert_close(wide(x.double()).float(), model(x), rtol=1e-4, atol=1e-5)
    twin = defended("own CNN", bank_dtype=torch.float16)
    torch.testing.assert_close(twin(x), model(x), rtol=0.1, atol=0.05)
    other = otad.defend(make("own CNN", seed=8), *data("own CNN"), n_neighbors=4)
    other.load_state_dict(model.state_dict())
    assert torch.equal(other(x), model(x))
    assert torch.equal(model.replace(n_neighbors=6).replace(n_neighbors=4)(x), model(x))
    found: dict[int, Tensor] = {}

    def run(row: int) -> None:
        for _ in range(5):
            found[row] = model.backbone.embed(x[row : row + 1])

    threads = [threading.Thread(target=run, args=(row,)) for row in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for row, features in found.items():
        torch.testing.assert_close(features, model.backbone.embed(x[row : row + 1]))
    compiled = torch.compile(model.backbone, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x), model.backbone(x))


def crowded() -> tuple[Tensor, Tensor]:
    """Three classes of points, some of them twice, one pair with two labels."""
    x = torch.rand(60, 5, generator=torch.Generator().manual_seed(0))
    y = (3 * x[:, 0]).long()
    x[40:50], y[40:50] = x[:10], y[:10]
    x[1], y[1] = x[0], (y[0] + 1) % 3
    return x, y


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scope", [None, "local"])
def test_the_lift_over_inputs_needs_no_network(scope: str | None, dtype: torch.dtype) -> None:
    x, y = crowded()
    options = {} if scope is None else {"scope": scope}
    with pytest.warns(UserWarning, match="3 of 60 equal a point of another class"):
        model = otad.defend(None, x, y, inputs="pixels", bank_dtype=dtype, **options)
    assert (model.scope, model.smoothness) == (scope or "global", 2.0)
    assert model.notes["defense"]["path"] == "inputs"
    stored = model.bank_inputs[:, :5].to(x)
    rivals = torch.cdist(stored, stored, compute_mode="donot_use_mm_for_euclid_dist")
    rivals = rivals.masked_fill(y[:, None] == y, torch.inf).amin(1)
    clear = rivals > 0  # all but those of two labels
    assert int(clear.sum()) == 57
    stored, y, rivals = stored[clear], y[clear], rivals[clear]
    assert torch.equal(model(stored).argmax(1), y)
    certificate = otad.certify(model, stored)
    if scope is None:  # half of the way to the nearest point of another class, and no more
        assert bool((certificate.radius <= rivals / 2 + 1e-3).all())
        assert float((certificate.radius / (rivals / 2)).median()) > 0.9


def test_the_lift_over_inputs_to_values_has_the_least_constant() -> None:
    x, _ = crowded()
    y = x.sum(1) ** 2
    y[40] += 0.5  # a copy of row 0, as row 1 is
    model = otad.defend(None, x, y, inputs="pixels")
    means = y.clone()
    means[[0, 1, 40]] = y[[0, 1, 40]].mean()
    torch.testing.assert_close(model(x), means, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(model.backbone(x), means, rtol=1e-4, atol=1e-4)
    rise, run = (means[:, None] - means).abs(), torch.cdist(x.double(), x.double())
    steepest = float((rise / run.clamp_min(1e-6)).max())
    assert float(model.backbone.head.weight[0, -1]) == pytest.approx(steepest, rel=1e-4)
    found = otad.certify_values(model, x[5:9], 0.01)
    assert bool(((found.high - found.low) / 0.02 <= 1.01 * steepest).all())
    local = otad.defend(
        make("MLP for values"), *data("MLP for values"), inputs="pixels", scope="local"
    )
    assert "Sequential is not used" in local.notes["defense"]["says"]
    x, y = data("MLP for values")
    torch.testing.assert_close(local(x), y, rtol=1e-4, atol=1e-4)


@pytest.mark.filterwarnings("ignore:points. 3 of 60 equal")
def test_models_without_a_network_are_saved_and_mapped(tmp_path: Path) -> None:
    for number, y in enumerate((crowded()[1], crowded()[0].sum(1))):
        x = crowded()[0]
        mapped = {"bank_path": str(tmp_path / f"bank{number}"), "resident": False}
        model = otad.defend(None, x, y, inputs="pixels", bounds=(0.0, 1.0), **mapped)
        model.save(tmp_path / str(number))
        again = otad.load(tmp_path / str(number), resident=False)
        assert torch.equal(again(x[:9] / 2), model(x[:9] / 2))
        assert again.backbone.bounds == (0.0, 1.0)


class Folding(nn.Module):
    """Keeps the size of inputs, but moves near points apart and past each other."""

    def forward(self, x: Tensor) -> Tensor:
        return (9 * x).sin()


@pytest.mark.parametrize("mapped", [False, True])
def test_a_global_map_by_default_never_fails(mapped: bool, tmp_path: Path) -> None:
    x, y = crowded()
    head = nn.Linear(5, 3)
    net = otad.nets.SequentialBackbone(None, [Folding()], head, input_shape=(5,))
    where = {"bank_path": str(tmp_path / "bank"), "resident": False} if mapped else {}
    with pytest.warns(
        UserWarning, match="defense: The global map of least L .*takes its place"
    ) as said:
        model = otad.defend(net, x, y, scope="global", **where)
    assert len(said) == 1
    assert model.notes["defense"]["path"] == "lift"
    assert isinstance(model.backbone, otad.nets.Lift)
    torch.testing.assert_close(model.backbone(x), net(x))
    torch.testing.assert_close(model(x), net(x), rtol=1e-4, atol=1e-4)
    assert bool((otad.certify(model, x[:9]).radius > 0).all())
    with pytest.raises(SolverError, match=r"strong_convexity \(0.5\)"):  # which was asked for
        otad.defend(net, x, y, scope="global", strong_convexity=0.5)


def test_a_global_estimator_by_default_never_fails() -> None:
    x, y = crowded()
    training = {"epochs": 1, "n_blocks": 1, "energy_weight": 0.0, "learning_rate": 1.0}
    with pytest.warns(UserWarning, match="defense: The global map of least L"):
        model = otad.OTADClassifier(scope="global", random_state=0, **training).fit(x, y)
    assert model.module_.notes["defense"]["path"] == "lift"
    assert model.module_.notes["classes"] == ["0", "1", "2"]
    assert model.predict(x).shape == (60,)


@pytest.mark.parametrize("last", [nn.LogSoftmax(1), nn.Softmax(1), nn.Sigmoid()])
@pytest.mark.parametrize("classes", [2, 5])
def test_the_head_is_the_layer_of_which_outputs_are_a_function(
    last: nn.Module, classes: int
) -> None:
    x = torch.rand(32, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    net = TwoHeads(classes, last)
    with torch.no_grad():
        answers = net(x)[0].argmax(1)
        assert bool((answers == net(x)[1].argmax(1)).double().mean() > 0.9)
    assert find_head(net, x, task="classification").name == "main"


def test_columns_of_a_frame_are_known_by_name() -> None:
    pandas = pytest.importorskip("pandas")
    drawn = torch.rand(30, 3, generator=torch.Generator().manual_seed(0)).numpy()
    frame, y = pandas.DataFrame(drawn, columns=["a", "b", "c"]), torch.arange(30) % 2
    net = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 2))
    model = otad.defend(net, frame, y)
    assert model.notes["feature_names"] == ["a", "b", "c"]
    assert torch.equal(otad.predict(model, frame), otad.predict(model, drawn))
    refuses(otad.predict, model, frame[["b", "a", "c"]], match="x: expected the columns a, b, c")


def test_what_cannot_be_evaluated_is_named() -> None:
    x, y = torch.rand(4, 1, 8, 8), torch.zeros(4, dtype=torch.int64)
    how = {"attacks": ["noise"], "flags": False}
    for net in (Scores().eval(), TwoHeads(3, nn.Identity()).eval()):
        refuses(otad.evaluate, net, x, y, otad.L2(0.1), **how, match="model: expected a tensor")
    model = otad.defend(nn.Sequential(nn.Flatten(), nn.Linear(64, 2)), x, y, n_neighbors=2)
    for wrong in (x.double(), (255 * x).byte()):
        refuses(otad.evaluate, model, wrong, y, otad.L2(0.1), **how, match="x: expected dtype")
    refuses(
        otad.evaluate, model, x[:0], y[:0], otad.L2(0.1), **how, match=r"x: .*got \(0, 1, 8, 8\)"
    )


@pytest.mark.parametrize("inputs", ["auto", "pixels"])
def test_floats_that_look_like_labels_are_pointed_out(inputs: str) -> None:
    x = torch.rand(40, 4, generator=torch.Generator().manual_seed(0))
    y = (x[:, 0] > 0.5).float()
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)) if inputs == "auto" else None
    with pytest.warns(UserWarning, match="y: the floats 0, 1 are taken .* as integers") as seen:
        assert otad.defend(net, x, y, inputs=inputs).backbone.task == "regression"
    assert seen[0].filename == __file__
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "y:")
        otad.defend(net, x, x.sum(1), inputs=inputs)


def test_inputs_of_another_shape_are_refused_in_words() -> None:
    x, y = torch.rand(12, 4), torch.arange(12) % 3
    net, takes = nn.Sequential(nn.Linear(5, 3)).eval(), r"takes float32 of shape \(12, 4\) on cpu"
    refuses(otad.predict, net, x, match=f"model: expected a module that {takes}")
    refuses(otad.attack, net, x, y, otad.L2(0.1), match=f"model: expected a module that {takes}")
    how = {"attacks": ["pgd"], "flags": False}
    refuses(otad.evaluate, net, x, y, otad.L2(0.1), match=f"model: .*{takes}", **how)


@pytest.mark.parametrize(
    ("metric", "message"),
    [
        (nn.Linear(5, 2), r"metric: expected a module that takes float32 of shape \(1, 4\)"),
        (nn.Unflatten(1, (2, 2)), r"metric: expected keys of shape \(B,m\), got \(1, 2, 2\)"),
        (nn.LSTM(4, 2), r"metric: expected keys of shape \(B,m\), got tuple"),
    ],
)
def test_a_metric_of_another_shape_is_refused_in_words(metric: nn.Module, message: str) -> None:
    x, y = torch.rand(12, 4), torch.arange(12) % 3
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    refuses(otad.defend, net, x, y, n_neighbors=3, metric=metric, match=message)


class Dropping(nn.Module):
    """Drops features in evaluation mode too."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 16), nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(nn.functional.dropout(self.first(x).relu(), 0.5, True))


def test_a_network_that_is_random_is_told() -> None:
    with pytest.warns(UserWarning, match="net: the network answers the same inputs differently"):
        otad.defend(Dropping(), *crowded())


def test_labels_of_one_class_need_no_map() -> None:
    x, message = torch.rand(6, 2), "y: expected labels of at least two classes.* up to 0"
    refuses(otad.defend, None, x, torch.zeros(6).long(), inputs="pixels", match=message)
