"""CIP-net: a transformer in place of the solver."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from otad.checks import MOST_BLOCKS, check_choice, check_count, require
from otad.cip.execution import blocks
from otad.cip.protocols import RowProblem
from otad.cip.solution import CipSolution
from otad.errors import InputError
from otad.nets.inputs import draw_linear, standard_normal, with_memory
from otad.nets.vit import Block

READOUTS = ("free", "hull", "plain")
PRECISIONS = ("float32", "bfloat16")
_BLOCK_BYTES = 2**29  # the size of the neighbors that are in working memory at a time


class CipNet(nn.Module):
    """A transformer encoder that estimates the image z' (B, d) of a convex integration problem.

    Its 2K + 1 tokens are the query, the K anchors and the K images, embedded by one linear map for
    inputs and one for features. The two tokens of a neighbor are also mixed. The last block gives
    `z' = sum_i lambda_i z~_i + s W t`, where lambda is the softmax of a score of each image token,
    t is the query token, and W is (d, width). The scores and W are zero at first, so that a new
    network answers with the mean feature of the neighbors.

    The network has the symmetries of the problem. It sees the shifted images
    `z~_i = z_i - l (x_i - x')` as differences from the mean neighbor, in units of their root mean
    square (r for inputs, s for features), and the curvature as `M r / (M r + s)`. So nothing
    changes if all `x_i` and x' are translated, if neighbors are reordered, or if x is measured in
    other units (and L and l accordingly). The image z' moves and scales with the features.

    A network proves nothing: the status is ESTIMATED, or UNSOLVED where numbers are out of range.
    Everything but the image is NaN; multipliers are known if `readout` is "hull".

    Parameters
    ----------
    dim : int
        The dimension d of inputs and features.
    n_neighbors : int
        The number K of neighbors.
    width, blocks, heads : int
        The width of tokens, the number of blocks, and the number of attention heads.
    hidden : int or None
        The width of the MLP in each block, by default `width`.
    readout : str
        "free", or "hull" to leave out the term `s W t`, so that z' is a convex combination of
        features like the solver's. With "plain" the network is a plain encoder as in the paper,
        without these symmetries: `z' = W t`, from points and features as they are.
    precision : str
        The precision of matrix products: "float32", or "bfloat16", which is many times faster on a
        GPU.
    generator : torch.Generator or None
        The source of the weights, by default of seed 0.

    Examples
    --------
    >>> import torch
    >>> import otad
    >>> from otad.cip.surrogate import CipNet
    >>> net = CipNet(2, n_neighbors=3, width=8, blocks=1, heads=2)
    >>> points = torch.rand(4, 3, 2)
    >>> problem = otad.cip.CipProblem(torch.rand(4, 2), points, points, smoothness=2.0)
    >>> solution = net(problem)
    >>> solution.status_text, torch.allclose(solution.image, points.mean(1))
    ('4 estimated', True)
    """

    # What a model needs from its solver, see `otad.cip.protocols`.
    mode: ClassVar[str] = "estimated"
    spares: ClassVar[int] = 0
    max_smoothness: ClassVar[float | None] = None

    def __init__(
        self,
        dim: int,
        n_neighbors: int = 10,
        *,
        width: int = 2048,
        blocks: int = 6,
        heads: int = 16,
        hidden: int | None = None,
        readout: str = "free",
        precision: str = "float32",
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        self.dim = check_count(dim, "dim")
        self.n_neighbors = check_count(n_neighbors, "n_neighbors")
        self.width, self.heads = check_count(width, "width"), check_count(heads, "heads")
        require(width % heads == 0, "heads", f"a divisor of the width {width}", heads)
        self.hidden = width if hidden is None else check_count(hidden, "hidden")
        self.readout = check_choice(readout, "readout", READOUTS)
        self.precision = check_choice(precision, "precision", PRECISIONS)
        drawn_by = generator or torch.Generator().manual_seed(0)

        def linear(fan_in: int, fan_out: int, gain: float) -> nn.Linear:
            return draw_linear(nn.Linear(fan_in, fan_out, device="meta"), drawn_by, gain=gain)

        self.from_input = linear(dim, width, 1.0)
        self.from_feature = linear(dim, width, 1.0)
        plain = readout == "plain"
        if not plain:
            self.feature_to_input = linear(width, width, 1.0)
            self.input_to_feature = linear(width, width, 1.0)
        self.kinds = nn.Parameter(0.02 * standard_normal(3, width, generator=drawn_by))
        if not plain:
            self.curvature = nn.Parameter(0.02 * standard_normal(width, generator=drawn_by))
        self.blocks = nn.ModuleList(
            Block(width, heads, self.hidden, 1e-6, drawn_by)
            for _ in range(check_count(blocks, "blocks", most=MOST_BLOCKS))
        )
        self.norm = nn.LayerNorm(width)
        self.correction: nn.Linear | None = None
        if plain:
            self.correction = linear(width, dim, 1.0)
            return
        self.score = _zero(nn.Linear(width, 1, bias=False, device="meta"))
        if readout == "free":
            self.correction = _zero(nn.Linear(width, dim, device="meta"))

    def forward(self, problem: RowProblem) -> CipSolution:
        """Return the estimate for each row, differentiable in the query and in the weights."""
        self.check_problem(problem)
        batch, count, _ = problem.shape
        query = problem.query
        chunk = max(1, _BLOCK_BYTES // (2 * count * self.dim * query.element_size()))
        rounds = self.precision == "bfloat16"
        with torch.autocast(query.device.type, torch.bfloat16) if rounds else nullcontext():
            parts = [self._estimate(problem, rows) for rows in blocks(batch, chunk)]
        image, weights = (torch.cat(column) for column in zip(*parts, strict=True))
        if self.correction is not None:  # then the answer is not a mean of features
            weights = torch.full_like(weights, torch.nan)
        return CipSolution.estimate(image, weights, self.mode)

    def check_problem(self, problem: RowProblem) -> None:
        """Refuse a problem of another size, dtype or device than the network's."""
        self.check_sizes(*problem.shape[1:], name="problem")
        net, given = (
            f"{part.dtype} on {part.device}" for part in (self.from_input.weight, problem.query)
        )
        require(net == given, "query", f"{net} like the net", given)

    def check_sizes(self, n_neighbors: int, dim: int, *, name: str = "solver") -> None:
        """Refuse another number of neighbors or another dimension than the network's."""
        fits = (n_neighbors, dim) == (self.n_neighbors, self.dim)
        own = f"{self.n_neighbors} neighbors in dimension {self.dim}"
        require(fits, name, f"{own} like the CipNet", f"{n_neighbors} in dimension {dim}")

    def estimate(
        self, query: Tensor, anchors: Tensor, images: Tensor, smoothness: float, convexity: float
    ) -> Tensor:
        """Return images (B, d) for queries (B, d) with neighbors (B, K, d).

        This uses plain torch operations and checks no values, for compiled and exported models."""
        low = torch.full_like(query[:, :1, None], convexity)
        parts = query, anchors, images, torch.full_like(low, smoothness), low
        rounds = self.precision == "bfloat16"
        with torch.autocast(query.device.type, torch.bfloat16) if rounds else nullcontext():
            return self._image(*parts, convexity != 0)[0]

    def _estimate(self, problem: RowProblem, rows: slice) -> tuple[Tensor, Tensor]:
        query, per_row = problem.query[rows], (problem.smoothness, problem.strong_convexity)
        high, low = (part[rows].to(query.dtype)[:, None, None] for part in per_row)
        pairs = problem.anchors_of(rows), problem.images_of(rows)
        return self._image(query, *pairs, high, low, problem.has_strong_convexity)

    def _image(
        self,
        query: Tensor,
        anchors: Tensor,
        images: Tensor,
        high: Tensor,
        low: Tensor,
        has_convexity: bool,
    ) -> tuple[Tensor, Tensor]:
        """Return z' (b,d) and the weights (b,K); the curvature is (b,1,1)."""
        query, anchors, images = query[:, None], anchors.to(query.dtype), images.to(query.dtype)
        if self.readout == "plain":
            assert self.correction is not None
            parts = self.from_input(query), self.from_input(anchors), self.from_feature(images)
            image = self.correction(self._encode(*parts)[:, 0]).to(query.dtype)
            overflow = ~image.isfinite().all(1, keepdim=True)
            return image.masked_fill(overflow, torch.nan), query.new_zeros(images.shape[:2])
        modulus = high - low
        if has_convexity:
            images = images - low * (anchors - query)
        middle, center = anchors.mean(1, keepdim=True), images.mean(1, keepdim=True)
        query, anchors, features = query - middle, anchors - middle, images - center
        reach, spread = _root_mean_square(query, anchors), _root_mean_square(features)

        # Units are applied after the product. So the query's reach enters the short tokens and not
        # the long anchors, whose gradients would cost the most.
        asking, places = (_in_units(self.from_input, part, reach) for part in (query, anchors))
        values = _in_units(self.from_feature, features, spread)
        mixed = self.feature_to_input(values), self.input_to_feature(places)
        places, values = places + mixed[0], values + mixed[1]
        bend = modulus * reach / (modulus * reach + spread) * self.curvature
        tokens = self._encode(asking, places, values, bend)
        weights = self.score(tokens[:, -images.shape[1] :]).softmax(1).to(query.dtype)
        kind = query.device.type
        rounds = torch.is_autocast_enabled(kind)  # autocast would round the features too
        with torch.autocast(kind, enabled=False) if rounds else nullcontext():
            image = (center + weights.mT @ features)[:, 0]
        if self.correction is not None:
            image = image + spread[:, 0] * self.correction(tokens[:, 0])
        overflow = ~(reach + spread).isfinite()
        return image.masked_fill(overflow[:, 0], torch.nan), weights[..., 0]

    def _encode(self, *parts: Tensor) -> Tensor:
        """Return the tokens (b,2K+1,width) of query, anchors and images after the last block.

        A fourth part (b,1,width) is added to all of them."""
        kinds = zip(parts[:3], self.kinds, strict=True)
        tokens = torch.cat([part + kind for part, kind in kinds], dim=1)
        for part in parts[3:]:
            tokens = tokens + part
        for block in self.blocks:
            tokens, _ = block(tokens)
        return self.norm(tokens)  # type: ignore[no-any-return]

    def config(self) -> dict[str, Any]:
        """Return what is needed, beside the state dict, to make this network again: plain JSON."""
        names = ("dim", "n_neighbors", "width", "blocks", "heads", "hidden", "readout", "precision")
        return {name: getattr(self, name) for name in names} | {"blocks": len(self.blocks)}

    @classmethod
    def from_config(cls, config: Mapping[str, Any]) -> CipNet:
        """Make the network that `config` describes, with fresh weights."""
        options = dict(config)
        options.pop("chunk", None)  # an option in older files
        try:
            return cls(**options)
        except TypeError as error:
            raise InputError(f"config: expected the options of a CipNet, got {config!r}") from error


def _in_units(layer: nn.Linear, vectors: Tensor, unit: Tensor) -> Tensor:
    """Return the layer's output for vectors (b,k,d) / unit (b,1,1)."""
    return nn.functional.linear(vectors, layer.weight) / unit + layer.bias


def _root_mean_square(*vectors: Tensor) -> Tensor:
    """Return the root mean square of all entries of each row (b,1,1), which is never zero."""
    tiny = torch.finfo(vectors[0].dtype).tiny
    squares = [torch.linalg.vector_norm(part, dim=(1, 2), keepdim=True) ** 2 for part in vectors]
    count = sum(part[0].numel() for part in vectors)
    return (torch.stack(squares).sum(0) / count + tiny).sqrt()


def _zero(layer: nn.Linear) -> nn.Linear:
    with_memory(layer)
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
