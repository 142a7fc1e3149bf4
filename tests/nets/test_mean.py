"""The mean of networks with proved Lipschitz constants: against its members and pairs of inputs."""

from __future__ import annotations

import pytest
import torch
from factories import refuses
from torch import Tensor

import otad
from otad.nets import LinfDistNet, MeanNet, OrthogonalNet, SOCNet, load_net, save_net

SHAPE = (1, 4, 8)


def images(count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(count, *SHAPE, generator=generator, dtype=torch.float64)


def member(seed: int, **options) -> OrthogonalNet:
    common = {"width": 16, "blocks": 1, "bounds": (0.0, 1.0), "mean": 0.4, "std": 0.5}
    return OrthogonalNet(SHAPE, 3, seed=seed, **common | options).double().eval()


def mean_of_three() -> MeanNet:
    soc = SOCNet(SHAPE, 3, widths=(4,), depth=1, bounds=(0.0, 1.0), mean=0.4, std=0.5)
    return MeanNet([member(0), member(1, stages=2), soc.double()]).eval()


def test_outputs_are_the_mean_of_those_of_the_members() -> None:
    net, x = mean_of_three(), images(5)
    expected = torch.stack([one(x) for one in net.members]).mean(0)
    assert torch.allclose(net(x), expected, rtol=0, atol=1e-12)


def test_features_stretch_no_pair_more_than_the_stated_constant() -> None:
    net, x, y = mean_of_three(), images(200), images(200, seed=1)
    near = x + 1e-4 * (y - x)
    for other in (y, near):
        apart = (net.embed(x) - net.embed(other)).norm(dim=1)
        inputs = (net.normalize(x) - net.normalize(other)).flatten(1).norm(dim=1)
        assert (apart <= net.lipschitz.constant * inputs).all()
    assert net.lipschitz.constant < 1.01
    assert (net.embed(x).norm(dim=1) <= net.lipschitz.offset + 2.0 * len(x[0].flatten())).all()


def test_its_certified_radii_hold_against_steps_along_the_gradient() -> None:
    net, x = mean_of_three(), images(30)
    found = otad.certify(net, x)
    assert found.radius.max() > 0
    for row, radius in enumerate(found.radius.tolist()):
        label = int(net(x[row : row + 1]).argmax())
        for rival in {0, 1, 2} - {label}:
            moved = x[row : row + 1].clone().requires_grad_()
            outputs = net(moved)[0]
            (slope,) = torch.autograd.grad(outputs[rival] - outputs[label], moved)
            step = 0.999 * radius * slope / slope.norm()
            assert int(net(moved.detach() + step).argmax()) == label


def test_the_map_through_all_pairs_keeps_the_answers_of_the_mean() -> None:
    net = MeanNet([member(seed) for seed in (0, 1)]).float().eval()
    x = images(12).float()
    model = otad.defend(net, x, torch.arange(12) % 3, scope="global")
    assert torch.allclose(model(x), net(x), atol=1e-3)
    assert (otad.certify(model, x).radius > 0).any()


def test_it_is_saved_and_loaded_with_its_members(tmp_path) -> None:
    net = mean_of_three().float()
    save_net(net, tmp_path / "net.safetensors")
    again, x = load_net(tmp_path / "net.safetensors"), images(4).float()
    assert torch.equal(again(x), net(x))
    assert again.lipschitz == net.lipschitz


def test_members_are_normalized_as_the_mean_states_whatever_a_file_says() -> None:
    net, state = mean_of_three(), mean_of_three().state_dict()
    state["members.0.std"] = state["members.0.std"] / 100
    net.load_state_dict(state)
    assert torch.equal(net.members[0].std, net.std)


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([], "at least one network"),
        ([member(1, std=0.6)], "the std of the first"),
        ([member(1, bounds=None)], "bounds"),
        ([LinfDistNet(SHAPE, 3, widths=(4,))], "proved constant in l2"),
        ([OrthogonalNet((1, 8, 8), 3, width=16)], "input_shape"),
    ],
)
def test_members_that_do_not_fit_together_are_refused(others: list, message: str) -> None:
    refuses(MeanNet, [member(0), *others] if others else [], match=message)
