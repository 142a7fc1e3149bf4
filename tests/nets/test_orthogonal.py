"""The network of orthogonal matrices: against loops, Jacobians and pairs of inputs."""

from __future__ import annotations

import torch
from factories import refuses
from torch import Tensor

from otad.certify.input_reach import KEY_ROUNDOFFS
from otad.nets import LinearHead, LipschitzBound, OrthogonalNet, fc_resnet, only_normalizes
from otad.nets.base import build
from otad.nets.inputs import restored
from otad.nets.lift import Lift, feature_lift
from otad.nets.lipschitz import LipschitzNet, norm_bounds
from otad.nets.orthogonal import orthogonal_weights, retract

SHAPE = (2, 4, 8)


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def moved(net: OrthogonalNet, seed: int = 0) -> OrthogonalNet:
    """The net with positions and biases that are not 0, as after training."""
    with torch.no_grad():
        stages = [part for stage in net.parts for part in (stage.positions, stage.biases)]
        for number, weight in enumerate((*stages, net.head.bias)):
            weight.add_(0.3 * random(*weight.shape, seed=100 * seed + number))
    return net.eval()


def small(seed: int = 0, **options) -> OrthogonalNet:
    sizes = {"width": 16, "blocks": 2, "stages": 2, "mean": 0.4, "std": 0.7} | options
    return moved(OrthogonalNet(SHAPE, 3, seed=seed, **sizes), seed)


def slow(net: OrthogonalNet, x: Tensor) -> Tensor:
    """The outputs for one input (C,H,W), pixel by pixel."""
    x = (x - net.mean) / net.std
    tokens = {(row, column): x[:, row, column] for row in range(4) for column in range(8)}
    for stage in net.parts:
        down, right = ((max(places) + 1) // 2 for places in zip(*tokens, strict=True))
        tokens = {
            (row, column): torch.cat(
                [tokens[2 * row + i, 2 * column + j] for i in (0, 1) for j in (0, 1)]
            )
            for row in range(down)
            for column in range(right)
        }
        width = stage.biases.shape[1]
        for place, token in tokens.items():
            if stage.mixer is None:
                tokens[place] = torch.cat([token, token.new_zeros(width - len(token))])
            else:
                tokens[place] = stage.mixer @ token
        part, weights = width // 16, (stage.matrices, stage.positions, stage.biases)
        for (turn, basis), position, bias in zip(*weights, strict=True):
            mixed = {place: basis @ (token + position[place]) for place, token in tokens.items()}
            for row, column in tokens:
                token = mixed[row, column].clone()
                sources = (row - 1, column), (row + 1, column), (row, column - 1), (row, column + 1)
                for group, (above, beside) in enumerate(sources):
                    own = slice(group * part, (group + 1) * part)
                    token[own] = mixed[above % down, beside % right][own]
                token = turn @ basis.T @ token + bias
                left, other = token[: width // 2], token[width // 2 :]
                larger, smaller = torch.maximum(left, other), torch.minimum(left, other)
                tokens[row, column] = torch.cat([larger, smaller])
    pooled = torch.stack([*tokens.values()]).square().sum(0).sqrt()
    return net.head.weight @ pooled + net.head.bias


def test_outputs_are_those_of_loops() -> None:
    net, x = small().double(), random(3, *SHAPE)
    expected = torch.stack([slow(net, one) for one in x])
    torch.testing.assert_close(net(x), expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(net.train()(x), expected, rtol=1e-12, atol=1e-12)


def test_no_jacobian_and_no_pair_is_stretched_more_than_stated() -> None:
    net = small().double()
    bound = net.lipschitz
    assert bound.norm == "l2"
    assert 1 <= bound.constant < 1 + 1e-5
    x = random(40, *SHAPE)
    jacobians = torch.func.vmap(torch.func.jacrev(lambda one: net.embed(one[None])[0]))(x)
    norms = torch.linalg.matrix_norm(jacobians.flatten(2), 2) * 0.7
    assert 0.8 < norms.max() <= bound.constant
    first = net.parts[0]  # an isometry, as every stage after its mixer
    before = torch.func.jacrev(lambda one: first(one)[-1])(random(1, 2, 4, 16))
    lengths = torch.linalg.svdvals(before.reshape(128, 128))
    torch.testing.assert_close(lengths, torch.ones_like(lengths), rtol=1e-6, atol=0)
    for step in (1e-4, 1.0, 10.0):
        other = x + step * random(*x.shape, seed=1)
        apart = (net.embed(other) - net.embed(x)).norm(dim=1)
        run = bound.constant / 0.7 * (other - x).flatten(1).norm(dim=1)
        assert bool((apart <= run).all())
    with torch.no_grad():
        first.matrices[1, 1] *= 1.5
        net.parts[1].mixer *= 2.0
    assert net.lipschitz.constant >= 2 * 1.5**2


def test_rounding_and_hidden_values_are_within_what_is_stated() -> None:
    net = small(width=64, blocks=8)
    wide = small(width=64, blocks=8).double()
    x = 3 * random(200, *SHAPE).float()
    bound, length = net.lipschitz, ((x - 0.4) / 0.7).double().flatten(1).norm(dim=1)
    size = bound.constant * length + bound.offset
    with torch.no_grad():
        error = (net.embed(x).double() - wide.embed(x.double())).norm(dim=1)
        tokens = torch.zeros(1, 2, 4, 64, dtype=torch.float64)
        tokens[..., :8] = random(1, 2, 4, 8)
        hidden = wide._hidden(tokens)
    assert float((error / size).max()) < KEY_ROUNDOFFS / 16 * torch.finfo(torch.float32).eps
    assert max(float(each.norm()) for each in hidden) <= float(tokens.norm()) + bound.offset


def test_rounding_does_not_grow_with_the_image() -> None:
    """The terms of a sum over 12,544 equal tokens are all rounded in the same direction."""
    net = OrthogonalNet((1, 224, 224), 2, width=16, blocks=1).eval()
    x = torch.linspace(0.1, 1, 30).view(-1, 1, 1, 1).expand(-1, *net.input_shape)
    with torch.no_grad():
        found = net.embed(x).double()
        error = (found - net.double().embed(x.double())).norm(dim=1)
    size = net.lipschitz.constant * x.double().flatten(1).norm(dim=1)
    assert float((error / size).max()) < KEY_ROUNDOFFS / 16 * torch.finfo(torch.float32).eps


def test_a_lift_has_the_normalization_of_what_is_inside() -> None:
    lift = Lift(small(), stretch=1.0)
    state = {name: tensor.clone() for name, tensor in lift.state_dict().items()}
    state["inner.std"] *= 0.02
    lift.load_state_dict(state)
    assert torch.equal(lift.std, lift.inner.std)
    assert lift.std.max() < 0.02


class Plane(LipschitzNet):
    """A linear classifier, whose embedding only normalizes."""

    def __init__(self) -> None:
        super().__init__((3,), 2)
        self.head = LinearHead(3, 2, "classification")

    @property
    def lipschitz(self) -> LipschitzBound:
        return LipschitzBound("l2", 1.0, 0.0)


def test_a_lift_that_shrinks_directions_does_more_than_normalize() -> None:
    assert only_normalizes(Lift(Plane(), stretch=1.0))
    assert not only_normalizes(Lift(Plane(), stretch=1.0, unread=0.5))


def test_matrices_are_retracted_to_the_nearest_orthogonal_ones() -> None:
    net = small().double()
    with torch.no_grad():
        for weight in orthogonal_weights(net):
            weight.add_(0.03 * random(*weight.shape))
    known = [weight.detach().clone() for weight in orthogonal_weights(net)]
    assert [weight.shape[-2:] for weight in known] == [(3, 32), (16, 16), (32, 64), (32, 32)]
    for weight in known:
        largest = torch.linalg.matrix_norm(weight, 2)
        assert bool((norm_bounds(weight) >= largest).all())
    retract(net)
    for before, after in zip(known, orthogonal_weights(net), strict=True):
        left, _, right = torch.linalg.svd(before, full_matrices=False)
        torch.testing.assert_close(after.detach(), left @ right, rtol=1e-12, atol=1e-12)
        assert bool((norm_bounds(after) < 1 + 1e-11).all())


def test_unread_directions_shrink_and_outputs_stay() -> None:
    net, x = small().double(), random(30, *SHAPE)
    whole, lift = feature_lift(net), feature_lift(net, 0.25)
    torch.testing.assert_close(lift(x), net(x))
    head, (full, less) = net.head.weight, (one.embed(x)[:, :-3] for one in (whole, lift))
    torch.testing.assert_close(less @ head.T, full @ head.T)
    apart = [one - one @ head.T @ head for one in (less, full)]
    torch.testing.assert_close(4 * apart[0], apart[1], rtol=1e-4, atol=1e-5)
    rises, runs = (torch.pdist(points) for points in (net(x), less))
    assert bool((rises <= lift.stretch * runs).all())
    assert net.lipschitz.constant <= lift.embedding_lipschitz.constant < 1 + 1e-5
    assert whole.embedding_lipschitz == net.lipschitz
    refuses(Lift, net, stretch=1.0, unread=0.0, match=r"unread: .*up to 1, got 0.0")
    refuses(Lift, fc_resnet((4,), 2), stretch=1.0, unread=0.5, match="1 for a FCResNet")


def test_a_net_that_was_saved_before_there_were_stages_is_read() -> None:
    net, x = small(stages=1), random(3, *SHAPE).float()
    state = {name.removeprefix("parts.0."): tensor for name, tensor in net.state_dict().items()}
    config = {name: value for name, value in net.config().items() if name != "stages"}
    assert "matrices" in state
    assert torch.equal(restored(build, config, state)(x), net(x))


def test_bad_sizes_are_refused() -> None:
    for width in (15, 14, 0, 17):
        refuses(OrthogonalNet, (1, 8, 8), 3, width=width, match="width: expected")
    for stages in (0, 9, 1.5):
        refuses(OrthogonalNet, (1, 8, 8), 3, stages=stages, match="stages: expected")
    refuses(OrthogonalNet, (1, 8, 12), 3, stages=3, match=r"sides that 8 divides, got \(1, 8, 12\)")
    refuses(OrthogonalNet, (8, 8, 8), 3, width=30, match="at least 32 channels, got 30")
    refuses(OrthogonalNet, (1, 8, 8), 40, width=32, match="at least 40 channels")
    refuses(OrthogonalNet, (1, 7, 8), 3, match=r"sides that 2 divides, got \(1, 7, 8\)")
    refuses(OrthogonalNet, (1, 8, 8), 1, task="regression", match="task: expected")
    refuses(OrthogonalNet, (1, 8, 8), 3, blocks=0, match="blocks: expected")
